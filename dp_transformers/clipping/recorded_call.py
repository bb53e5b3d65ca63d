"""Records of a forward pass, and of each call of a module that owns parameters, for the backward passes over it."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ..mechanism.values import equal_or_nan
from ..runtime.randomness import random_state, same_state
from .batch_dims import BATCH_FIRST, BatchDim, PackedRows
from .deferred_checks import DeferredChecks
from .errors import HOW_TO_DO_WITHOUT, UnsupportedModuleError
from .owners import Owner
from .parallel.dtensor import to_local
from .precision import reduced_products
from .ragged import is_ragged, packed, unpacked
from .terms import Term
from .trainable import TrainableParameters
from .units import Units


class BackwardPass(Protocol):
    """One backward pass over the losses, as its taps use it (:mod:`.modes`)."""

    def on_call(self, owner: Owner, saved: Sequence[torch.Tensor]) -> None:
        """Observe that a call of ``owner`` was reached, with the tensors that its tap saved."""

    def wants_only_norms_of(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Return True if this pass needs only the per-example norms of these parameters, and no gradient or factors of
        it."""

    def add(self, parameter: nn.Parameter, term: Term) -> None:
        """Add the term of one use of ``parameter``."""

    def finish(self) -> torch.Tensor:
        """Form the clipped sums after all taps were reached. Return the (B,) gradient norms."""


@dataclass(eq=False)
class ForwardPass:
    """One forward pass of the model.

    Attributes:
        batch_size: B.
        probe: (B,) zeros, to which all taps lead.
        trainable: The trainable parameters.
        suspended: A context in which the model runs without taps.
        batch: A token of the physical batch; passes with different tokens are never clipped together.
        follows: True if only the clipper may run backward over it.
        deferred_checks: Those of the clipped sums.
        is_current: False once a later pass has replaced it, or a backward pass has used it.
        earlier_probes: Those of forward passes that no backward has used.
        uses: Recorded calls: the number of terms of each gradient.
        returned: Numbers in the first outputs of these calls.
        positions: Possible numbers of positions of an example.
        whole: Owners that could not run one example at a time.
        unknown: An owner that was called differently than in the self-check.
        reentrant: True if some module ran without a graph, to be re-run inside backward.
        recomputes: True if activation checkpointing runs modules again inside backward.
        packs: True if saved tensors are discarded or moved, by activation checkpointing or offloading.
        units: Which rows are clipped together; None: each row by itself.
        backward: The pass in progress.
    """

    batch_size: int
    probe: torch.Tensor
    trainable: TrainableParameters
    suspended: Callable[[], AbstractContextManager] = nullcontext
    batch: object = None
    follows: bool = False
    deferred_checks: DeferredChecks = field(default_factory=DeferredChecks)
    is_current: bool = True
    earlier_probes: list[torch.Tensor] = field(default_factory=list)
    uses: Counter[nn.Parameter] = field(default_factory=Counter)
    returned: Counter[nn.Parameter] = field(default_factory=Counter)
    positions: set[int] = field(default_factory=set)
    whole: set[Owner] = field(default_factory=set)
    unknown: Owner | None = None
    reentrant: bool = False
    recomputes: bool = False
    packs: bool = False
    units: Units | None = None
    backward: BackwardPass | None = None

    def go_back(self, backward: BackwardPass) -> None:
        """Let ``backward`` have the terms of the taps that are reached from now on."""
        self.backward, self._is_reached = backward, False
        self.reduced = reduced_products(self.probe.device)  # once for all taps

    def record_call(self, owner: Owner, returned: int = 0) -> None:
        """Count a term for each parameter of ``owner``, and the numbers that the call returned. Inside the backward
        pass, where activation checkpointing runs a call again, they were counted already."""
        if self.backward is not None:
            self.recomputes = True
            return
        self.packs |= torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        for p in owner.names:
            self.uses[p] += 1
            self.returned[p] += returned

    def record_kind(self, owner: Owner, inputs: Sequence[torch.Tensor]) -> None:
        """Record that ``owner`` is called differently than in the self-check, if it is."""
        if owner.knows(inputs) or self.unknown is not None:
            return
        if self.reentrant and self.backward is not None:
            raise ValueError(
                f"{owner} is called otherwise than in the self-check, under reentrant activation checkpointing, where "
                "that is seen too late: use use_reentrant=False."
            )
        self.unknown = owner

    def forget_uses(self, parameters: Iterable[nn.Parameter]) -> None:
        """Uncount one term of each of these parameters."""
        if self.backward is None:
            self.uses.subtract(parameters)

    def holds_all_positions(self, x: torch.Tensor) -> bool:
        """Return True if ``x`` may have a row for every position of every example and nothing else."""
        if self.batch_size == 0:
            return len(x) == 0
        positions, rest = divmod(len(x), self.batch_size)
        return rest == 0 and positions in self.positions

    def require_clipper(self) -> None:
        """Raise ValueError if a tap was reached by a backward pass that the clipper did not start but should have."""
        if self.follows and self.is_current and self.backward is None:
            raise ValueError(
                "the model's outputs were differentiated by something else than loss.backward() "
                "(torch.autograd.grad, or inputs=..., or a reference to torch's function from before the model was "
                "made private), so no gradient was clipped. Do that on a deepcopy of the model, which has no clipper, "
                "or inside 'with engine.suspended():'."
            )

    def probe_gradient(self) -> torch.Tensor | None:
        """Return a gradient for the probe, once in a backward pass."""
        if self._is_reached:
            return None
        self._is_reached = True
        return self.probe.detach()


class RecordedCall:
    """One call of a module in one forward pass.

    Attributes, set in backward between :meth:`restore` and :meth:`release`:
        inputs, outputs: The input tensors and the floating-point outputs, detached, in order.
        backprops: Gradients of the summed losses with respect to the outputs.
        input_gradients: A key for each input that needs a gradient. A rule that computes them cheaply sets all of
            them, and the module's own backward does not run.

    Attributes:
        random_state: State of torch's generators at the start of the call; None if the call did not use them.
        autocast: The :func:`autocast_state` of a call that may be re-run.
    """

    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]
    backprops: Sequence[torch.Tensor]
    input_gradients: dict[torch.Tensor, torch.Tensor | None]
    output_leaves: Sequence[Any]

    def __init__(self, owner: Owner, forward: ForwardPass, args: tuple, kwargs: dict, output: Any, first_node: int):
        self.owner, self.forward, self.parameters = owner, forward, owner.names
        self.module, self.batch_size = owner.module, forward.batch_size
        self.first_node = first_node  # autograd's sequence number at the start of the call
        rule, module = owner.rule, owner.module
        self._read = {} if rule.reads is None else dict(rule.reads(module))
        self._tensors_read = [] if rule.reads_tensors is None else [*map(_sample, rule.reads_tensors(module))]
        self.is_ragged = False
        if not owner.has_rule:  # rows of different lengths are re-run one by one
            args, kwargs = unpacked(owner.module, args, kwargs)
            self.is_ragged = any(is_ragged(x) for x in (*args, *kwargs.values()))
        leaves, self._input_spec = _flatten((args, kwargs))
        self._leaves = [_TENSOR if isinstance(x, torch.Tensor) else x for x in leaves]
        self.inputs = [x for x in leaves if isinstance(x, torch.Tensor)]
        self.output_leaves, self._output_spec = _flatten(output)
        self.outputs = [x for x in self.output_leaves if is_differentiable(x)]
        if not self.outputs:
            raise ValueError(
                f"{owner} returns {type(output).__name__}, which holds no tensor with a gradient. " + HOW_TO_DO_WITHOUT
            )
        parallel = forward.trainable.parallel
        self.sums_positions = bool(parallel) and parallel.sums_positions(owner, self.inputs, self.outputs)
        if parallel:
            self.inputs, self.outputs = [to_local(x) for x in self.inputs], [to_local(x) for x in self.outputs]
        forward.record_kind(owner, self.inputs)
        batch_dims = owner.batch_dims_of(self.inputs, self.outputs, self.batch_size)
        self.input_batch_dims, self.output_batch_dims = batch_dims[: len(self.inputs)], batch_dims[len(self.inputs) :]
        if not owner.has_rule and self._output_spec is not None:
            sequences = [x for x in tree_leaves(output, is_leaf=is_ragged) if is_ragged(x)]
            rows = {id(x.data): PackedRows(order=x[1:]) for x in sequences}
            dims = zip(self.outputs, self.output_batch_dims, strict=True)
            self.output_batch_dims = [rows.get(id(x), batch_dim) for x, batch_dim in dims]
        if not owner.rule.takes_call:
            self.outputs = [
                self._with_batch(x, batch_dim)
                for x, batch_dim in zip(self.outputs, self.output_batch_dims, strict=True)
            ]
        self.random_state = None
        if owner.may_be_rerun:
            device = self.outputs[0].device
            self.autocast = autocast_state(device)
            if not same_state(owner.random_state, random_state(device)):
                self.random_state = owner.random_state

    def require_as_called(self) -> None:
        """Raise ValueError if an attribute or tensor that the rule reads has changed since the call."""
        rule = self.owner.rule
        read = {} if rule.reads is None else dict(rule.reads(self.module))
        if changed := [name for name in self._read | read if not _is_same(self._read, read, name)]:
            before, after = ({name: seen[name] for name in changed if name in seen} for seen in (self._read, read))
            raise ValueError(
                f"{self.owner} computed with {before}, and before the backward pass that was set to {after}, so "
                "its gradients would be wrong: change it between two steps, and call backward inside the same 'with' "
                "block as forward."
            )
        if rule.reads_tensors is not None:
            now = [*map(_sample, rule.reads_tensors(self.module))]
            if same := [equal_or_nan(*pair).all() for pair in zip(self._tensors_read, now, strict=True)]:
                otherwise = partial(_refuse_other_tensors, str(self.owner))  # outlives the call
                self.forward.deferred_checks.expect(torch.stack(same).all(), otherwise)

    def _with_batch(self, x: torch.Tensor, batch_dim: BatchDim) -> torch.Tensor:
        """Return ``x`` with a batch dimension. An output (1, ...) for the whole batch is expanded, so that its
        gradient is per example."""
        batch = self.batch_size
        if batch_dim.holds_examples(x, batch) and (not batch_dim.flat or self.forward.holds_all_positions(x)):
            return x
        # unless the self-check saw no such output: an expert, for instance, may be called on one token, and so one row
        may_be_for_all = self.owner.returned_unbatched_output or self.owner.known_ranks is None
        if x.dim() and len(x) == 1 and batch_dim == BATCH_FIRST and may_be_for_all:
            return x.expand(batch, *x.shape[1:])
        raise UnsupportedModuleError(  # the self-check then makes a parent own the parameters
            f"{self.owner} returns a tensor of shape {tuple(x.shape)}, whose first dimension is neither the batch "
            f"({batch}) nor 1, so gradients per example cannot be told apart. " + HOW_TO_DO_WITHOUT,
            self.module,
        )

    # ---- in backward ----

    def restore(
        self,
        saved: Sequence[torch.Tensor],
        backprops: Sequence[torch.Tensor],
        input_gradients: dict[torch.Tensor, torch.Tensor | None],
    ) -> None:
        """Set the tensors of the call from those that its tap saved."""
        number = len(self.input_batch_dims)
        self.inputs, self.outputs = saved[:number], saved[number:]
        self.backprops, self.input_gradients = backprops, input_gradients

    def release(self) -> None:
        """Drop the tensors of the call."""
        self.inputs = self.outputs = self.backprops = ()
        self.input_gradients = {}

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The arguments of the call, by the parameter names of the module's ``forward``."""
        args, kwargs = self.rebuilt(self.inputs)
        arguments = inspect.signature(self.module.forward).bind(*args, **kwargs)
        arguments.apply_defaults()
        return arguments.arguments

    def rebuilt(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple, dict]:
        """Return the arguments of the call with these tensors instead of its own."""
        given = iter(tensors)
        leaves = [next(given) if x is _TENSOR else x for x in self._leaves]
        return (tuple(leaves), {}) if self._input_spec is None else packed(tree_unflatten(leaves, self._input_spec))

    def rebuilt_output(self, leaves: list[Any]) -> Any:
        return leaves[0] if self._output_spec is None else tree_unflatten(leaves, self._output_spec)

    def inputs_by_example(self) -> list[torch.Tensor]:
        """Return the inputs as (B, ...), or (B, positions, ...) if they are flat. Inputs without a batch dimension are
        not changed."""
        return self._by_example(self.inputs, self.input_batch_dims)

    def outputs_by_example(self) -> list[torch.Tensor]:
        return self._by_example(self.outputs, self.output_batch_dims)

    def backprops_by_example(self) -> list[torch.Tensor]:
        return self._by_example(self.backprops, self.output_batch_dims)

    def _by_example(self, tensors: Sequence[torch.Tensor], batch_dims: Sequence[BatchDim]) -> list[torch.Tensor]:
        return [dim.batch_first(x, self.batch_size) for x, dim in zip(tensors, batch_dims, strict=True)]

    def input_has_examples(self) -> list[bool]:
        """Return a flag for each input, True if it has an entry for each example."""
        return [
            batch_dim.holds_examples(x, self.batch_size)
            for x, batch_dim in zip(self.inputs, self.input_batch_dims, strict=True)
        ]


def autocast_state(device: torch.device) -> tuple[str, torch.dtype, bool]:
    """Return the device type, the precision of autocast on it, and True if autocast is on."""
    kind = device.type
    return kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)


def is_differentiable(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def differentiable_leaves(output: Any) -> list[torch.Tensor]:
    return [x for x in _flatten(output)[0] if is_differentiable(x)]


def _flatten(structure: Any) -> tuple[list[Any], Any]:
    """Return leaves and spec of an output, or of (args, kwargs). The spec is None for the common cases of one tensor
    and one positional tensor."""
    if isinstance(structure, torch.Tensor):
        return [structure], None
    if isinstance(structure, tuple) and len(structure) == 2 and structure[1] == {}:
        args = structure[0]
        if isinstance(args, tuple) and len(args) == 1 and isinstance(args[0], torch.Tensor):
            return [args[0]], None
    return tree_flatten(structure)


_TENSOR = object()  # stands for a tensor, which autograd holds
_SAMPLE = 2**14  # numbers of a tensor that are compared


def _sample(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of evenly spaced numbers of ``x``."""
    flat = x.detach().reshape(-1)
    return flat[:: max(1, len(flat) // _SAMPLE) | 1].clone()


def _refuse_other_tensors(owner: str) -> None:
    raise ValueError(
        f"{owner} computed with other weights, or statistics, than it had before the backward pass (they were "
        "replaced for the call, as by functional_call, or scaled in place and restored), so its gradients would be "
        "wrong. Change them between two steps only."
    )


def _is_same(before: Mapping[str, object], after: Mapping[str, object], name: str) -> bool:
    """Return True if both have the setting with the same value. Tensors and arrays are compared by identity."""
    if name not in before or name not in after:
        return False
    old, new = before[name], after[name]
    return old is new or (type(old) is type(new) and isinstance(old, _PLAIN) and old == new)


_PLAIN = (bool, int, float, str, tuple, torch.Size)
