"""A module without a rule runs one example at a time in the forward pass itself, vectorised by ``torch.func.vmap``.

Every example has a copy of the parameters that the module owns (:class:`.tap.ParameterTap`), so what autograd finds
for the copies are the gradients of the examples, and nothing runs a second time. That no example sees another one
holds by what vmap is, not by what the module does.

Inside, a tensor is that of one example, a batch of one, and vmap hides the others. A module with a rule that is called
there is shown the tensors of the whole batch all the same (:meth:`ExamplesApart.record`), and so is an embedding or a
linear layer that the module computes by a function (:class:`_Functions`): their terms are those of any other call.

What cannot run so (control flow that depends on data, in-place writes, attributes that are set) raises, and is run
again in the backward pass instead (:mod:`.fallback`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from .batch_dims import BatchDim, kind_of_call
from .fallback import put_back, refuse_new_data, substituted, without_fused_attention, without_vmap_warnings
from .owners import Owner
from .precision import HALF
from .ragged import is_ragged
from .recorded_call import ForwardPass, is_differentiable
from .tap import CopiedParameters, ParameterTap

Record = Callable[[Owner, tuple, dict, Any, int], Any]
OnWholeBatch = Callable[[Sequence[torch.Tensor], Sequence[bool]], Sequence[torch.Tensor]]
_PLAIN = (bool, int, float, str, bytes, torch.dtype, torch.device, slice, range, type(None))


class CannotRunByExample(RuntimeError):
    """The module needs the whole batch."""


class UnknownCall(CannotRunByExample):
    """The module needs the whole batch for this call, of which the self-check has not learned where examples are."""


class ForwardByExample:
    """Stands in a module for its class's ``forward`` while the model is hooked."""

    calls_class_forward = True

    def __init__(self, owner: Owner, run: Callable[[Owner, Callable, tuple, dict], Any]):
        self.owner, self._run = owner, run

    @property
    def __wrapped__(self) -> Callable:  # inspect.signature looks for it, too
        module = self.owner.module
        return type(module).forward.__get__(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self.owner, self.__wrapped__, args, kwargs)


class ExamplesApart:
    """Runs modules one example at a time.

    Args:
        record: ``f(owner, args, kwargs, output, first_node)`` records a call on the whole batch, and returns the
            output to go on with, None for the same.
    """

    def __init__(self, record: Record):
        self._record = record
        self._layers: dict[tuple, Owner] = {}  # those that modules compute by a function
        self._index: torch.Tensor | None = None  # that of the example, while vmap hides the batch

    @property
    def is_running(self) -> bool:
        return self._index is not None

    def run(self, forward: ForwardPass, owner: Owner, function: Callable, args: tuple, kwargs: dict) -> Any:
        """The output of ``function(*args, **kwargs)``, the forward of the owner's module.

        Raises:
            Exception: whatever vmap, or the module under it, raises, if the module cannot run so.
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
            self._index, its = index, iter(given)
            args, kwargs = tree_unflatten([next(its) if isinstance(x, torch.Tensor) else x for x in leaves], spec)
            output = self._of_whole_batch(self._with_copies(forward, owner, function, args, kwargs), out_dims)
            return index

        index = torch.arange(forward.batch_size, device=forward.probe.device)
        dims = [0 if x is not whole else None for x, whole in zip(apart, tensors, strict=True)]
        try:
            with (
                without_compiled_functions(),
                without_fused_attention(),
                without_vmap_warnings(),
                put_back(owner.module, but_switches=True) as changed,
            ):
                torch.func.vmap(one_example, (0, dims), randomness="different")(index, apart)
        finally:
            self._index = None
        if changed:  # to tensors of one example, which mean nothing outside of vmap
            raise CannotRunByExample("its forward pass sets attributes")
        for x in _tensors(tree_flatten(output)[0]):
            if x.dtype in HALF:
                forward.low_precision = x.dtype
        return output

    def record(self, owner: Owner, args: tuple, kwargs: dict, output: Any, first_node: int) -> Any:
        """Record a call that was made for each example as one on the whole batch; the output to go on with."""
        given, given_spec = tree_flatten((args, kwargs))
        returned, returned_spec = tree_flatten(output)
        inputs, outputs = _tensors(given), [x for x in returned if is_differentiable(x)]
        batch_dims = owner.batch_dims_of(inputs, outputs, batch=1)
        out_dims = batch_dims[len(inputs) :]

        def recorded(tensors: Sequence[torch.Tensor], is_apart: Sequence[bool]) -> list[torch.Tensor]:
            batch = len(tensors[0])
            whole = _whole(tensors, is_apart, batch_dims)
            its, outputs = iter(whole[: len(inputs)]), tuple(whole[len(inputs) :])
            args, kwargs = tree_unflatten([next(its) if isinstance(x, torch.Tensor) else x for x in given], given_spec)
            found = self._record(owner, args, kwargs, outputs, first_node)
            found = outputs if found is None else found
            return [_split(x, dim, batch) for x, dim in zip(found, out_dims, strict=True)]

        found = iter(self.on_whole_batch(recorded, [*inputs, *outputs]))
        return tree_unflatten([next(found) if is_differentiable(x) else x for x in returned], returned_spec)

    def call_layer(
        self, owner: Owner, parameters: Sequence[nn.Parameter], x: torch.Tensor, make: Callable, *options: Any
    ) -> torch.Tensor:
        """What the layer ``make(*parameters, *options)`` of parameters that ``owner`` has returns for ``x``, recorded
        as a call."""
        key = owner, make, *parameters, *options

        def called(tensors: Sequence[torch.Tensor], is_apart: Sequence[bool]) -> list[torch.Tensor]:
            if key not in self._layers:
                names = {p: owner.names[p] for p in parameters}
                self._layers[key] = Owner(owner.paths, make(*parameters, *options), names)
            layer = self._layers[key]
            x, first_node = _for_each(tensors[1], is_apart[1], len(tensors[0])), torch.autograd._get_sequence_nr()
            output = layer.module(x)
            found = self._record(layer, (x,), {}, output, first_node)
            return [output if found is None else found]

        return self.on_whole_batch(called, [x])[0]

    def on_whole_batch(self, function: OnWholeBatch, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Call ``function(tensors, is_apart)`` outside of vmap, where tensors that differ between examples have the
        batch first. What it returns must have it first too, and comes back hidden. The number of the example leads."""
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
            copy._is_param = True  # some modules ask for the class
        functions = _Functions(self, owner, dict(zip(parameters, copies, strict=True)))
        forward.record_call(owner)
        forward.record_copies(owner)
        with substituted(owner.module, functions.copies), functions:
            output = function(*args, **kwargs)
        after, spec_after = tree_flatten((args, kwargs))
        if spec_after != spec or [*map(id, after)] != [*map(id, leaves)]:
            raise CannotRunByExample("it changes a container that it is given")
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
        its = iter(whole)
        return tree_unflatten([next(its) if isinstance(x, torch.Tensor) else x for x in leaves], spec)


def without_compiled_functions() -> AbstractContextManager:
    """Inside, what torch.compile compiled runs as it was written: the compiler would trace :class:`_Functions`, and
    lose the layers that are recorded there."""
    # where nobody imported the compiler, nothing is compiled
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


class _OnWholeBatch(torch.autograd.Function):
    """A Function's own rule for vmap is handed the tensors in which vmap hides the batch."""

    @staticmethod
    def forward(*args: Any) -> Any:
        raise CannotRunByExample("vmap ended before the module did")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        """Nothing is kept."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> tuple:
        (function, *tensors), dims = args, in_dims[1:]
        whole = [x if dim is None else x.movedim(dim, 0) for x, dim in zip(tensors, dims, strict=True)]
        found = tuple(function(whole, [dim is not None for dim in dims]))
        return found, (0,) * len(found)


_QUESTIONS = [vars(torch._C.TensorBase)[name].__get__ for name in ("requires_grad", "grad_fn", "is_leaf")]  # pyrefly: ignore[missing-attribute]
_INSTEAD: dict[Callable, str] = {
    functional.embedding: "_embedding",
    functional.linear: "_linear",
    functional.scaled_dot_product_attention: "_attention",
}


def _hooks_of_saved_tensors() -> Callable | None:
    """What puts away the tensors that autograd saves now, if anything does."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return None if hooks is None else hooks[0]


class _Functions(TorchFunctionMode):
    """Inside, an embedding or a linear layer of copied parameters is computed with the parameters themselves, and
    recorded as a call of such a layer; and attention is computed for the whole batch, as its kernels do."""

    def __init__(self, apart: ExamplesApart, owner: Owner, copies: dict[nn.Parameter, torch.Tensor]):
        super().__init__()
        self.copies, self._apart, self._owner = copies, apart, owner
        self._parameter_of = {id(copy): p for p, copy in copies.items()}
        self._in_layers: set[nn.Parameter] = set()
        self._elsewhere: set[nn.Parameter] = set()
        self._hooks = _hooks_of_saved_tensors()

    @property
    def only_in_layers(self) -> set[nn.Parameter]:
        """The parameters whose copies were of no use, as far as that is seen."""
        return self._in_layers - self._elsewhere

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        refuse_new_data(func)
        if func in _QUESTIONS:  # vmap hides what is asked for
            return func(_of_whole(args[0]))
        if _hooks_of_saved_tensors() is not self._hooks:
            raise CannotRunByExample("activation checkpointing in it would run a part again after vmap has ended")
        instead = _INSTEAD.get(func)  # by name: a bound method would keep all that is held here alive
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
        """The output of the layer; None where the layer would be refused, or where ``weight`` is no copy and has no
        padding. Where it has, vmap (torch 2.13) leaves out the gradient of that id for the first example alone."""
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
        """The output of the layer; None where ``weight`` or ``bias`` is no copy."""
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
        """The attention of all examples: entries of the first of four dimensions are independent. None for other
        tensors."""
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
    """The tensor in which vmap hides the batch."""
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


def _require_plain(leaves: Sequence[Any]) -> None:
    """Raise CannotRunByExample for an object that may hold tensors (a cache), which would be of other examples too."""
    for x in leaves:
        if not (isinstance(x, (torch.Tensor, *_PLAIN)) or callable(x)):
            raise CannotRunByExample(f"it is given or returns a {type(x).__name__}")


def _of_each(x: torch.Tensor, dim: BatchDim, forward: ForwardPass) -> torch.Tensor:
    """That of each example; ``x`` itself where it is the same for all."""
    batch = forward.batch_size
    if dim.flat and not forward.holds_all_positions(x):
        raise UnknownCall("it is given rows of unknown examples")
    if dim.dim is None and not dim.flat and batch > 1 and batch in x.shape:
        raise UnknownCall("what was the same for all examples may be one number for each")
    if dim.one_row and batch > 1 and x.shape[0] == batch:
        raise UnknownCall("where there was one row for all examples there may be one for each")
    if dim.holds_examples(x, batch):
        return _split(x, dim, batch)
    if dim.dim is not None and x.shape[dim.dim] != 1:
        raise UnknownCall("it is given a tensor with another size of batch")
    return x


def _split(x: torch.Tensor, dim: BatchDim, batch: int) -> torch.Tensor:
    apart = dim.batch_first(x, batch)
    return apart if dim.flat else apart.unsqueeze((dim.dim or 0) + 1)


def _for_each(x: torch.Tensor, is_apart: bool, batch: int) -> torch.Tensor:
    return x if is_apart else x.expand(batch, *x.shape)


def _whole(
    tensors: Sequence[torch.Tensor], is_apart: Sequence[bool], batch_dims: Sequence[BatchDim]
) -> list[torch.Tensor]:
    """The tensors behind the first one, which counts the examples, as those of the whole batch."""
    batch, each = len(tensors[0]), zip(tensors[1:], is_apart[1:], batch_dims, strict=True)
    return [_together(x, has_own, dim, batch) for x, has_own, dim in each]


def _together(x: torch.Tensor, is_apart: bool, dim: BatchDim, batch: int) -> torch.Tensor:
    if dim.flat:
        return dim.restored(_for_each(x, is_apart, batch))
    if dim.dim is None:
        if is_apart:
            raise CannotRunByExample("what is the same for all examples elsewhere is not here")
        return x
    x = _for_each(x, is_apart, batch)
    if x.dim() <= dim.dim + 1 or x.shape[dim.dim + 1] != 1:
        raise CannotRunByExample("a tensor of one example is no batch of one")
    return dim.restored(x.squeeze(dim.dim + 1))
