"""Finds out which modules own which parameters, and where their tensors have examples, by running the model on two
sizes of batch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from .batch_dims import SHARED, BatchDim, kind_of_call, learn_batch_dim
from .errors import UnownedParameterError
from .fallback import substituted, without_fused_attention
from .owners import Owner, assign_to_parent, uncalled_beside
from .parallel.dtensor import to_local
from .parallel.fsdp2 import Shards
from .ragged import is_ragged, unpacked, unpacked_sequence


class _Call(NamedTuple):
    """The kind of a call, and shapes: of what it was given, of the numbers with a gradient that it returned, and of
    all tensors that it returned."""

    kind: Hashable
    ins: list[torch.Size]
    outs: list[torch.Size]
    all_outs: list[torch.Size]


Calls = dict[Owner, list[_Call]]
Run = tuple[int, Calls]  # on so many examples


@contextmanager
def hidden_parameters(owners: Iterable[Owner], shards: Shards) -> Iterator[None]:
    """While an owner runs, its module sees detached copies of its parameters."""
    handles: list[Any] = []
    open_: list[tuple[Owner, ExitStack]] = []

    def hide(owner: Owner) -> None:
        stack = ExitStack()
        wholes = [whole for p in owner.names for whole in shards.all_unsharded(p)]
        # some modules ask for the class
        copies: dict[nn.Parameter, torch.Tensor] = {p: nn.Parameter(p.detach(), requires_grad=False) for p in wholes}
        stack.enter_context(substituted(owner.module, copies))
        open_.append((owner, stack))

    def show(owner: Owner) -> None:
        while open_ and open_[-1][0] is owner:
            open_.pop()[1].close()

    try:
        for owner in owners:
            handles.append(owner.module.register_forward_pre_hook(lambda m, a, owner=owner: hide(owner)))
            # the hooks of one module run in the order opposite to that of hiding
            handles.append(
                owner.module.register_forward_hook(
                    lambda m, a, o, owner=owner: show(owner), always_call=True, prepend=True
                )
            )
        yield
    finally:
        while open_:
            open_.pop()[1].close()
        for handle in handles:
            handle.remove()


def unowned_parameters(
    owners: Sequence[Owner], parameters: Sequence[nn.Parameter], losses: Callable[[], torch.Tensor], shards: Shards
) -> list[nn.Parameter]:
    """The parameters that still get a gradient when every owner sees detached copies: they are used outside all calls
    of their owners.

    Raises:
        ValueError: the losses depend on no trainable parameter at all.
    """
    wholes = [(p, whole) for p in parameters for whole in shards.all_unsharded(p)]
    with hidden_parameters(owners, shards), torch.enable_grad():
        # a leaf of its own keeps the graph alive where nothing escapes
        total = losses().sum() + torch.zeros((), requires_grad=True, device=wholes[0][1].device)
        gradients = torch.autograd.grad(total, [whole for _, whole in wholes], allow_unused=True)
    return list(dict.fromkeys(p for (p, _), g in zip(wholes, gradients, strict=True) if g is not None))


def _shapes(structure: Any, *, floating: bool) -> list[torch.Size]:
    return [
        x.shape
        for x in tree_leaves(tree_map(unpacked_sequence, structure, is_leaf=is_ragged))
        if isinstance(x, torch.Tensor) and (x.is_floating_point() or not floating)
    ]


@contextmanager
def _observed(owners: Sequence[Owner]) -> Iterator[Calls]:
    """Inside, every call of an owner adds the shapes of what it is given and of what it returns."""
    seen: Calls = {owner: [] for owner in owners}
    with ExitStack() as stack:
        for owner in owners:

            def note(module: nn.Module, args: tuple, kwargs: dict, output: Any, owner: Owner = owner) -> None:
                given = unpacked(module, args, kwargs)
                outs, all_outs = (_shapes(output, floating=floating) for floating in (True, False))
                kind = kind_of_call(args, kwargs)
                seen[owner].append(_Call(kind, _shapes(given, floating=False), outs, all_outs))

            stack.callback(owner.module.register_forward_hook(note, with_kwargs=True).remove)
        yield seen


def _learn_batch_dims(owners: Sequence[Owner], pairs: Sequence[tuple[Run, Run]], positions: set[int]) -> list[Owner]:
    """Set the batch dimensions of every owner from pairs of runs on two sizes of batch; the owners whose outputs
    cannot be told apart by example."""
    for owner in owners:
        owner.batch_dims, owner.tensor_batch_dims, owner.returned_unbatched_output = {}, {}, False
        owner.known_ranks = None if owner.rule.takes_call or owner.rule.tapped_inside else set()
    return [owner for owner in owners if not all(_learn_from(owner, *runs, positions) for runs in pairs)]


def _learn_from(owner: Owner, run: Run, other: Run, positions: set[int]) -> bool:
    """Whether the outputs of ``owner`` can be told apart by example."""
    if owner.rule.takes_call:
        return True  # it knows where its examples are
    (batch, seen), (other_batch, other_seen) = run, other
    calls, other_calls = seen[owner], other_seen[owner]
    owner.is_called = bool(calls)
    if not _are_of_one_kind(calls, other_calls):
        return False

    def learn(sizes: Sequence[torch.Size], other_sizes: Sequence[torch.Size]) -> list[BatchDim]:
        each = zip(sizes, other_sizes, strict=True)
        return [learn_batch_dim(*pair, batch, other_batch, positions) for pair in each]

    for (kind, ins, outs, all_outs), another in zip(calls, other_calls, strict=True):
        of_ins, of_outs = learn(ins, another.ins), learn(outs, another.outs)
        if owner.rule.tapped_inside:  # what is tapped there is batch first, if the module has a batch
            if any(dim.dim is None or x[dim.dim] != batch for x, dim in zip(outs, of_outs, strict=True)):
                return False
            continue
        if kind == another.kind:
            found = of_ins, learn(all_outs, another.all_outs)
            owner.needs_whole_batch |= found != owner.tensor_batch_dims.setdefault(kind, found)
        if owner.known_ranks is not None:
            owner.known_ranks.add(tuple(map(len, ins)))
        known = owner.batch_dims.setdefault((len(ins), len(outs)), of_ins + of_outs)
        if not outs or SHARED in of_outs or known != of_ins + of_outs:
            return False
        owner.returned_unbatched_output |= any(
            x[:1] == (1,) and not dim.dim for x, dim in zip(outs, of_outs, strict=True)
        )
    return True


def _are_of_one_kind(calls: Sequence[_Call], others: Sequence[_Call]) -> bool:
    """Whether the module was called as often, with and for as many tensors."""
    return [list(map(len, call[1:])) for call in calls] == [list(map(len, call[1:])) for call in others]


def _misread(owners: Sequence[Owner], losses_of: Callable[[int], torch.Tensor], batch: int) -> list[Owner]:
    """The owners whose output for the whole batch, once every example has its copy, is not read by each example from
    its own.

    A table of relative positions is one: flattened, then indexed, it is the first example's copy that everybody reads.
    """
    copies: list[tuple[Owner, torch.Tensor]] = []

    def copied(owner: Owner, x: Any) -> Any:
        if not (isinstance(x, torch.Tensor) and x.is_floating_point() and x.shape[:1] == (1,)):
            return x
        copy = x.expand(batch, *x.shape[1:]).clone()
        copies.append((owner, copy if copy.requires_grad else copy.requires_grad_()))
        return copy.clone()  # the model may write to it

    with ExitStack() as stack, torch.enable_grad():
        for owner in owners:
            if owner.returned_unbatched_output:
                hook = partial(lambda owner, module, args, output: tree_map(partial(copied, owner), output), owner)
                stack.callback(owner.module.register_forward_hook(hook).remove)
        # neither of the first example nor of the last, whose copies are the ones read by mistake
        loss = losses_of(batch)[1]
        if not copies or not loss.requires_grad:
            return []
        gradients = torch.autograd.grad(loss, [copy for _, copy in copies], allow_unused=True)
    own = torch.arange(batch) == 1
    return list(
        {
            owner: None
            for (owner, _), g in zip(copies, gradients, strict=True)
            if g is not None and bool(to_local(g)[~own].any())
        }
    )


def discover_owners(
    model: nn.Module,
    owners: list[Owner],
    parameters: Sequence[nn.Parameter],
    losses_of: Callable[[int, bool], torch.Tensor],
    tapped: Callable[[], Any],
    batch_sizes: tuple[int, int],
    positions: set[int],
    shards: Shards,
) -> None:
    """Assign parameters to parents, in place, until every use is seen by a module whose outputs have a batch, and
    learn the batch dimensions.

    Args:
        losses_of: ``f(size, is_padded) -> (size,)`` losses of a batch of that many examples, without taps; the first
            one's masks end a position earlier in one that is padded.
        tapped: One forward pass with taps; raises where a copy for each example does not fit.
        batch_sizes: Two sizes that no other dimension has.
        positions: How many positions an example may have (:func:`positions_of`).

    Raises:
        UnownedParameterError: a parameter is used where not even the model itself sees it.
    """
    size, other_size = batch_sizes

    def run(size: int, is_padded: bool) -> Run:
        with torch.no_grad(), _observed(owners) as calls:
            losses_of(size, is_padded)
        return size, calls

    while True:
        with without_fused_attention():
            with _observed(owners) as calls:
                wayward = unowned_parameters(owners, parameters, lambda: losses_of(size, False), shards)
            for p in wayward:
                paths = [path for owner in owners if p in owner.names for path in owner.paths]
                if not paths:  # which trying again would not change
                    raise UnownedParameterError(
                        "a trainable parameter is used and no module owns it: a forward pass freezes it for itself "
                        "(requires_grad_(False)), or takes it out of its module. Do that before training, or use "
                        "p.detach() there."
                    )
                assign_to_parent(model, owners, p, paths)
            if wayward:
                continue
            whole, padded = (size, calls), run(other_size, True)
            pairs = [(whole, padded)]
            # a mask that nothing needs is left out of some calls
            if not all(_are_of_one_kind(calls[owner], padded[1][owner]) for owner in owners):
                pairs = [(whole, run(other_size, False)), (run(size, True), padded)]
        lost = _learn_batch_dims(owners, pairs, positions)
        if not lost and any(owner.returned_unbatched_output for owner in owners):
            try:
                tapped()
                lost = _misread(owners, lambda size: losses_of(size, False), size)
            except Exception:
                lost = [owner for owner in owners if owner.returned_unbatched_output]
                if not lost:
                    raise
        if not lost:
            return
        for owner in lost + uncalled_beside(model, owners, lost):
            for p in list(owner.names):
                assign_to_parent(model, owners, p, owner.paths)
