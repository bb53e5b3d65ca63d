"""Runs a module without a rule one example at a time in the forward pass, vectorised by ``torch.func.vmap``.

Every example has a copy of the parameters that the module owns (:class:`.tap.ParameterTap`), so the gradients of the
copies are the per-example gradients, and nothing runs a second time. vmap guarantees that no example depends on
another one, whatever the module does.

Inside vmap, a tensor is a batch of one example. If the module calls another module that has a rule, that call is
recorded with the tensors of the whole batch (:meth:`ExamplesApart.record`), as calls outside vmap are. So is an
embedding or a linear layer that the module computes by a function (:class:`_Functions`).

A module that cannot run like this (control flow that depends on data, in-place writes, attributes that are set)
raises, and is re-run in the backward pass instead (:mod:`.fallback`)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from .batch_dims import BatchDim, kind_of_call
from .fallback import refuse_new_data, restored, substituted, without_fused_attention, without_vmap_warnings
from .owners import Owner
from .ragged import is_ragged
from .recorded_call import ForwardPass, is_differentiable
from .tap import CopiedParameters, ParameterTap

Record = Callable[[Owner, tuple, dict, Any, int], Any]
OnWholeBatch = Callable[[Sequence[torch.Tensor], Sequence[bool]], Sequence[torch.Tensor]]
_PLAIN = (bool, int, float, str, bytes, torch.dtype, torch.device, slice, range, type(None))


class CannotRunByExample(RuntimeError):
    """Raised if a module cannot run one example at a time."""


class UnknownCall(CannotRunByExample):
    """Raised for a call with unknown batch dimensions, which must run on the whole batch."""


class ForwardByExample:
    """Replaces the ``forward`` of a module instance while the model is hooked."""

    calls_class_forward = True

    def __init__(self, owner: Owner, run: Callable[[Owner, Callable, tuple, dict], Any]):
        self.owner, self._run = owner, run

    @property
    def __wrapped__(self) -> Callable:  # inspect.signature uses it too
        module = self.owner.module
        return type(module).forward.__get__(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self.owner, self.__wrapped__, args, kwargs)


class ExamplesApart:
    """Runs modules one example at a time.

    Args:
        record: ``f(owner, args, kwargs, output, first_node)`` records a call on the whole batch, and returns the
            output to continue with.
    """

    def __init__(self, record: Record):
        self._record = record
        self._layers: dict[tuple, Owner] = {}  # layers that modules compute by a function
        self._index: torch.Tensor | None = None  # index of the example, inside vmap

    @property
    def is_running(self) -> bool:
        return self._index is not None

    def run(self, forward: ForwardPass, owner: Owner, function: Callable, args: tuple, kwargs: dict) -> Any:
        """Return the output of ``function(*args, **kwargs)``, the forward of the owner's module.

        Raises:
            Exception: any exception of vmap, or of the module inside it, if the module cannot run like this.
        """
        if self.is_running:
            return self._with_copies(forward, owner, function, args, kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        tensors, known = _tensors(leaves), owner.tensor_batch_dims.get(kind_of_call(args, kwargs))
        if known is None or any(is_ragged(x) for x in (*args, *kwargs.values())):
            raise UnknownCall("it is called otherwise than in the self-check")
        in_dims, out_dims = known
        apart = [_of_each(x, dim, forward) for x, dim in zip(tensors, in_dims, strict=True)]
        output: Any = None

        def one_example(index: torch.Tensor, given: list[torch.Tensor]) -> torch.Tensor:
            nonlocal output
            self._index = index
            args, kwargs = _with_tensors(leaves, spec, given)
            output = self._of_whole_batch(self._with_copies(forward, owner, function, args, kwargs), out_dims)
            return index

        index = torch.arange(forward.batch_size, device=forward.probe.device)
        dims = [0 if x is not whole else None for x, whole in zip(apart, tensors, strict=True)]
        try:
            with (
                without_compiled_functions(),
                without_fused_attention(),
                without_vmap_warnings(),
                restored(owner.module, but_flags=True) as changed,
            ):
                torch.func.vmap(one_example, (0, dims), randomness="different")(index, apart)
        finally:
            self._index = None
        if changed:  # to tensors of one example, which are invalid outside of vmap
            raise CannotRunByExample("its forward pass sets attributes")
        return output

    def record(self, owner: Owner, args: tuple, kwargs: dict, output: Any, first_node: int) -> Any:
        """Record a call that was made for each example as one call on the whole batch. Return the output to continue
        with."""
        given, given_spec = tree_flatten((args, kwargs))
        returned, returned_spec = tree_flatten(output)
        inputs, outputs = _tensors(given), [x for x in returned if is_differentiable(x)]
        batch_dims = owner.batch_dims_of(inputs, outputs, batch=1)
        out_dims = batch_dims[len(inputs) :]

        def recorded(tensors: Sequence[torch.Tensor], is_apart: Sequence[bool]) -> list[torch.Tensor]:
            batch = len(tensors[0])
            whole = _whole(tensors, is_apart, batch_dims)
            args, kwargs = _with_tensors(given, given_spec, whole[: len(inputs)])
            outputs = tuple(whole[len(inputs) :])
            found = self._record(owner, args, kwargs, outputs, first_node)
            return [_split(x, dim, batch) for x, dim in zip(found, out_dims, strict=True)]

        found = iter(self.on_whole_batch(recorded, [*inputs, *outputs]))
        return tree_unflatten([next(found) if is_differentiable(x) else x for x in returned], returned_spec)

    def call_layer(
        self, owner: Owner, parameters: Sequence[nn.Parameter], x: torch.Tensor, make: Callable, *options: Any
    ) -> torch.Tensor:
        """Call the layer ``make(*parameters, *options)``, with parameters of ``owner``, on ``x``, and record the
        call."""
        key = owner, make, *parameters, *options

        def called(tensors: Sequence[torch.Tensor], is_apart: Sequence[bool]) -> list[torch.Tensor]:
            if key not in self._layers:
                names = {p: owner.names[p] for p in parameters}
                self._layers[key] = Owner(owner.paths, make(*parameters, *options), names)
            layer = self._layers[key]
            x, first_node = _for_each(tensors[1], is_apart[1], len(tensors[0])), torch.autograd._get_sequence_nr()
            return [self._record(layer, (x,), {}, layer.module(x), first_node)]

        return self.on_whole_batch(called, [x])[0]

    def on_whole_batch(self, function: OnWholeBatch, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Call ``function(tensors, is_apart)`` outside of vmap, on tensors with the batch first (if ``is_apart``),
        beginning with the index of the example. The tensors that it returns, batch first, are those of one example
        again inside vmap."""
        return _OnWholeBatch.apply(function, self._index, *tensors)

    def _with_copies(self, forward: ForwardPass, owner: Owner, function: Callable, args: tuple, kwargs: dict) -> Any:
        (leaves, spec), parameters = tree_flatten((args, kwargs)), list(owner.names)
        _require_plain(leaves)
        call = CopiedParameters(owner, forward, torch.autograd._get_sequence_nr())

        def copied(tensors: Sequence[torch.Tensor], is_apart: Sequence[bool]) -> Sequence[torch.Tensor]:
            saved = [x.detach() for x in tensors[1:]]
            return ParameterTap.apply(call, forward.probe, len(parameters), *parameters, *saved)

        copies = self.on_whole_batch(copied, [x for x in leaves if is_differentiable(x)])
        for copy in copies:
            copy._is_param = True  # some modules check the class
        functions = _Functions(self, owner, dict(zip(parameters, copies, strict=True)))
        forward.record_call(owner, forward.batch_size)  # its terms have one number for each example
        with substituted(owner.module, functions.copies), functions:
            output = function(*args, **kwargs)
        after, spec_after = tree_flatten((args, kwargs))
        if spec_after != spec or [*map(id, after)] != [*map(id, leaves)]:
            raise CannotRunByExample("it changes a container among its arguments")
        forward.forget_uses(functions.only_in_layers)
        return output

    def _of_whole_batch(self, output: Any, out_dims: Sequence[BatchDim]) -> Any:
        leaves, spec = tree_flatten(output)
        _require_plain(leaves)
        whole: list[torch.Tensor] = []

        def keep(tensors: Sequence[torch.Tensor], is_apart: Sequence[bool]) -> list[torch.Tensor]:
            whole.extend(_whole(tensors, is_apart, out_dims))
            return []

        self.on_whole_batch(keep, _tensors(leaves))
        return _with_tensors(leaves, spec, whole)


def without_compiled_functions() -> AbstractContextManager:
    """Run compiled functions eagerly inside the context: the compiler would trace :class:`_Functions`, and lose the
    layers that are recorded there."""
    # nothing is compiled if the compiler was never imported
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


class _OnWholeBatch(torch.autograd.Function):
    """Gets the tensors of the whole batch inside vmap: a Function's own vmap rule receives them."""

    @staticmethod
    def forward(*args: Any) -> Any:
        raise CannotRunByExample("vmap ended before the module did")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        """Save nothing."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> tuple:
        (function, *tensors), dims = args, in_dims[1:]
        whole = [x if dim is None else x.movedim(dim, 0) for x, dim in zip(tensors, dims, strict=True)]
        found = tuple(function(whole, [dim is not None for dim in dims]))
        return found, (0,) * len(found)


_QUERIES = [vars(torch._C.TensorBase)[name].__get__ for name in ("requires_grad", "grad_fn", "is_leaf")]  # pyrefly: ignore[missing-attribute]
_INSTEAD: dict[Callable, str] = {
    functional.embedding: "_embedding",
    functional.linear: "_linear",
    functional.scaled_dot_product_attention: "_attention",
}


def _hooks_of_saved_tensors() -> Callable | None:
    """Return the hook that now packs the tensors which autograd saves; None if there is none."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return None if hooks is None else hooks[0]


class _Functions(TorchFunctionMode):
    """Computes an embedding or a linear layer of copied parameters with the parameters themselves, and records it as a
    call of such a layer; and computes attention for the whole batch, as its kernels do."""

    def __init__(self, apart: ExamplesApart, owner: Owner, copies: dict[nn.Parameter, torch.Tensor]):
        super().__init__()
        self.copies, self._apart, self._owner = copies, apart, owner
        self._parameter_of = {id(copy): p for p, copy in copies.items()}
        self._in_layers: set[nn.Parameter] = set()
        self._elsewhere: set[nn.Parameter] = set()
        self._hooks = _hooks_of_saved_tensors()

    @property
    def only_in_layers(self) -> set[nn.Parameter]:
        """The parameters that were used in recorded layers only, so that their copies have no gradient."""
        return self._in_layers - self._elsewhere

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        refuse_new_data(func)
        if func in _QUERIES:  # vmap hides the answer
            return func(_of_whole(args[0]))
        if _hooks_of_saved_tensors() is not self._hooks:
            raise CannotRunByExample("activation checkpointing in it would run a part again after vmap has ended")
        instead = _INSTEAD.get(func)  # a name, since a bound method would keep this object alive
        if instead is not None and (found := getattr(self, instead)(*args, **kwargs)) is not None:
            return found
        for x in tree_flatten((args, kwargs))[0]:
            if (p := self._parameter_of.get(id(x))) is not None:
                self._elsewhere.add(p)
        return func(*args, **kwargs)

    def _embedding(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> torch.Tensor | None:
        """Return the output of the layer; None if the layer would be refused, or if ``weight`` is no copy and has no
        padding. (With padding, vmap in torch 2.13 drops the gradient of that id for the first example only.)"""
        if max_norm is not None or scale_grad_by_freq or sparse:
            return None
        found = self._layer(input, [weight], _embedding_layer, padding_idx)
        if found is not None or padding_idx is None:
            return found
        found = functional.embedding(input, weight)
        return torch.where((input == padding_idx % len(weight)).unsqueeze(-1), found.detach(), found)

    def _linear(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Return the output of a linear layer that is called with an example's copies of parameters; None if
        ``weight`` or ``bias`` is no such copy, or no graph is built."""
        return self._layer(input, [weight] if bias is None else [weight, bias], _linear_layer)

    def _layer(
        self, input: torch.Tensor, copies: Sequence[torch.Tensor], make: Callable, *options: Any
    ) -> torch.Tensor | None:
        parameters = [self._parameter_of[id(copy)] for copy in copies if id(copy) in self._parameter_of]
        if len(parameters) < len(copies) or parameters[0].dim() != 2 or not torch.is_grad_enabled():
            return None
        self._in_layers |= set(parameters)
        return self._apart.call_layer(self._owner, parameters, input, make, *options)

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> torch.Tensor | None:
        """Compute scaled dot-product attention once for the whole batch, where queries, keys and values have four
        dimensions, the first of which is the batch. Return None, to let vmap compute it, for other tensors."""
        tensors = [query, key, value]
        if attn_mask is not None:
            tensors.append(attn_mask[None, None] if attn_mask.dim() == 2 else attn_mask)
        if any(x.dim() != 4 for x in tensors):
            return None

        def attended(tensors: Sequence[torch.Tensor], is_apart: Sequence[bool]) -> list[torch.Tensor]:
            batch = len(tensors[0])
            each = [_for_each(x, has_own, batch) for x, has_own in zip(tensors[1:], is_apart[1:], strict=True)]
            rows = max(x.shape[1] for x in each)
            query, key, value, *mask = [x.expand(-1, rows, *x.shape[2:]).flatten(0, 1) for x in each]
            output = functional.scaled_dot_product_attention(
                query, key, value, mask[0] if mask else None, dropout_p, is_causal, **options
            )
            return [output.unflatten(0, (batch, -1))]

        return self._apart.on_whole_batch(attended, tensors)[0]


def _of_whole(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor of the whole batch behind a tensor inside vmap."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def _embedding_layer(weight: nn.Parameter, padding_idx: int | None) -> nn.Embedding:
    layer = nn.Embedding(*weight.shape, padding_idx=padding_idx, device="meta")
    layer.weight = weight
    return layer


def _linear_layer(weight: nn.Parameter, bias: nn.Parameter | None = None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = weight
    layer.register_parameter("bias", bias)
    return layer


# ---- tensors of the whole batch, and of each example: (B, ...), batches of one ----


def _tensors(leaves: Sequence[Any]) -> list[torch.Tensor]:
    return [x for x in leaves if isinstance(x, torch.Tensor)]


def _with_tensors(leaves: Sequence[Any], spec: Any, tensors: Iterable[torch.Tensor]) -> Any:
    """Rebuild a structure with other tensors."""
    given = iter(tensors)
    return tree_unflatten([next(given) if isinstance(x, torch.Tensor) else x for x in leaves], spec)


def _require_plain(leaves: Sequence[Any]) -> None:
    """Raise CannotRunByExample for an object that may hold tensors of other examples, such as a cache."""
    for x in leaves:
        if not (isinstance(x, (torch.Tensor, *_PLAIN)) or callable(x)):
            raise CannotRunByExample(f"an argument or output is a {type(x).__name__}")


def _of_each(x: torch.Tensor, dim: BatchDim, forward: ForwardPass) -> torch.Tensor:
    """Split ``x`` by example. Return ``x`` itself if it is the same for all."""
    batch = forward.batch_size
    if dim.flat and not forward.holds_all_positions(x):
        raise UnknownCall("an argument has rows of unknown examples")
    if dim.dim is None and not dim.flat and batch > 1 and batch in x.shape:
        raise UnknownCall("an argument that was the same for all examples may have one entry for each")
    if dim.one_row and batch > 1 and x.shape[0] == batch:
        raise UnknownCall("an argument that had one row for all examples may have one for each")
    if dim.holds_examples(x, batch):
        return _split(x, dim, batch)
    if dim.dim is not None and x.shape[dim.dim] != 1:
        raise UnknownCall("an argument has another batch size")
    return x


def _split(x: torch.Tensor, dim: BatchDim, batch: int) -> torch.Tensor:
    apart = dim.batch_first(x, batch)
    return apart if dim.flat else apart.unsqueeze((dim.dim or 0) + 1)


def _for_each(x: torch.Tensor, is_apart: bool, batch: int) -> torch.Tensor:
    return x if is_apart else x.expand(batch, *x.shape)


def _whole(
    tensors: Sequence[torch.Tensor], is_apart: Sequence[bool], batch_dims: Sequence[BatchDim]
) -> list[torch.Tensor]:
    """Return the tensors after the first one, the indices of the examples, as tensors of the whole batch."""
    batch, each = len(tensors[0]), zip(tensors[1:], is_apart[1:], batch_dims, strict=True)
    return [_together(x, has_own, dim, batch) for x, has_own, dim in each]


def _together(x: torch.Tensor, is_apart: bool, dim: BatchDim, batch: int) -> torch.Tensor:
    if dim.flat:
        return dim.restored(_for_each(x, is_apart, batch))
    if dim.dim is None:
        if is_apart:
            raise CannotRunByExample("a tensor that was the same for all examples is not")
        return x
    x = _for_each(x, is_apart, batch)
    if x.dim() <= dim.dim + 1 or x.shape[dim.dim + 1] != 1:
        raise CannotRunByExample("a tensor of one example is no batch of one")
    return dim.restored(x.squeeze(dim.dim + 1))
