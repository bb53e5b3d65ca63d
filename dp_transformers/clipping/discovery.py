"""Discovers the owner of each parameter, and the batch dimensions of module inputs and outputs, by running the model
on two batch sizes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from .batch_dims import SHARED, BatchDim, kind_of_call, learn_batch_dim
from .errors import UnownedParameterError
from .fallback import substituted, without_fused_attention
from .owners import Owner, assign_to_parent, reassign_owners
from .parallel.dtensor import is_dtensor, to_local
from .parallel.fsdp2 import Shards
from .ragged import is_ragged, unpacked, unpacked_sequence

logger = logging.getLogger(__name__)


class _Call(NamedTuple):
    """The kind of a call, and the shapes of its input tensors, of its floating-point outputs, and of all outputs."""

    kind: Hashable
    ins: list[torch.Size]
    outs: list[torch.Size]
    all_outs: list[torch.Size]


Calls = dict[Owner, list[_Call]]
Run = tuple[int, Calls]  # batch size, calls


@contextmanager
def _after_calls(hooks: Iterable[tuple[nn.Module, Callable[[tuple, dict, Any], Any]]]) -> Iterator[None]:
    """Inside, ``hook(args, kwargs, output)`` runs after every call of its module, and may return another output."""
    with ExitStack() as stack:
        for module, hook in hooks:
            handle = module.register_forward_hook(
                lambda m, args, kwargs, output, hook=hook: hook(args, kwargs, output), with_kwargs=True
            )
            stack.callback(handle.remove)
        yield


@contextmanager
def _hidden_parameters(owners: Iterable[Owner], shards: Shards) -> Iterator[None]:
    """Give the module of an owner detached copies of its parameters while it runs."""
    running: list[tuple[Owner, AbstractContextManager]] = []

    def hide(owner: Owner) -> None:
        wholes = [whole for p in owner.names for whole in shards.all_unsharded(p)]
        # some modules check the class
        copies: dict[nn.Parameter, torch.Tensor] = {p: nn.Parameter(p.detach(), requires_grad=False) for p in wholes}
        running.append((owner, substituted(owner.module, copies)))
        running[-1][1].__enter__()

    def show(owner: Owner | None) -> None:
        while running and owner in (running[-1][0], None):
            running.pop()[1].__exit__(None, None, None)

    with ExitStack() as stack:
        for owner in owners:
            before = owner.module.register_forward_pre_hook(lambda m, a, owner=owner: hide(owner))
            # prepended, since hooks of one module must run in the reverse order of hiding
            after = owner.module.register_forward_hook(
                lambda m, a, o, owner=owner: show(owner), always_call=True, prepend=True
            )
            stack.callback(before.remove), stack.callback(after.remove)
        stack.callback(show, None)
        yield


def unowned_parameters(
    owners: Sequence[Owner], parameters: Sequence[nn.Parameter], losses: Callable[[], torch.Tensor], shards: Shards
) -> list[nn.Parameter]:
    """Return the parameters that still get a gradient when every owner sees detached copies: they are used outside all
    calls of their owners.

    Raises:
        ValueError: the losses depend on no trainable parameter at all.
    """
    wholes = [(p, whole) for p in parameters for whole in shards.all_unsharded(p)]
    with _hidden_parameters(owners, shards), torch.enable_grad():
        # an extra leaf keeps the graph alive if nothing escapes
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
    """Yield a record of every call of an owner inside the context: the shapes of its inputs and outputs."""
    seen: Calls = {owner: [] for owner in owners}

    def record(owner: Owner, args: tuple, kwargs: dict, output: Any) -> None:
        given = unpacked(owner.module, args, kwargs)
        outs, all_outs = (_shapes(output, floating=floating) for floating in (True, False))
        seen[owner].append(_Call(kind_of_call(args, kwargs), _shapes(given, floating=False), outs, all_outs))

    with _after_calls((owner.module, partial(record, owner)) for owner in owners):
        yield seen


def _learn_batch_dims(owners: Sequence[Owner], pairs: Sequence[tuple[Run, Run]], positions: set[int]) -> list[Owner]:
    """Set the batch dimensions of every owner from pairs of runs on two batch sizes. Return the owners whose outputs
    have no batch dimension."""
    for owner in owners:
        # what is known of a module that other rows reached stays known
        if owner.known_ranks is None or any(calls[owner] for pair in pairs for _, calls in pair):
            owner.batch_dims, owner.tensor_batch_dims, owner.returned_unbatched_output = {}, {}, False
            owner.known_ranks = None if owner.rule.takes_call or owner.rule.tapped_inside else set()
    return [owner for owner in owners if not all(_learn_from(owner, *runs, positions) for runs in pairs)]


def _learn_from(owner: Owner, run: Run, other: Run, positions: set[int]) -> bool:
    """Learn the batch dimensions of ``owner`` from two runs. Return False if its outputs have none."""
    if owner.rule.takes_call:
        return True  # the rule handles the batch dimension
    (batch, seen), (other_batch, other_seen) = run, other
    calls, other_calls = seen[owner], other_seen[owner]
    owner.is_called = bool(calls or owner.known_ranks)
    if not _have_same_structure(calls, other_calls):
        return False

    def learn(sizes: Sequence[torch.Size], other_sizes: Sequence[torch.Size]) -> list[BatchDim]:
        each = zip(sizes, other_sizes, strict=True)
        return [learn_batch_dim(*pair, batch, other_batch, positions) for pair in each]

    for (kind, ins, outs, all_outs), another in zip(calls, other_calls, strict=True):
        of_ins, of_outs = learn(ins, another.ins), learn(outs, another.outs)
        if owner.rule.tapped_inside:  # tapped tensors are batch first, if the module has a batch
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


def _have_same_structure(calls: Sequence[_Call], other_calls: Sequence[_Call]) -> bool:
    """Return True if the module was called equally often, with equal numbers of tensors in and out."""
    return [list(map(len, call[1:])) for call in calls] == [list(map(len, call[1:])) for call in other_calls]


def _misread(owners: Sequence[Owner], losses_of: Callable[[int], torch.Tensor], batch: int) -> list[Owner]:
    """Return the owners with a batch-less output such that, if every example gets a copy, an example does not read its
    own copy.

    A table of relative positions is one: flattened, then indexed, all examples read the first example's copy.
    """
    copies: list[tuple[Owner, torch.Tensor]] = []

    def copied(owner: Owner, x: Any) -> Any:
        if not (isinstance(x, torch.Tensor) and x.is_floating_point() and x.shape[:1] == (1,)):
            return x
        copy = x.expand(batch, *x.shape[1:]).clone()
        copies.append((owner, copy if copy.requires_grad else copy.requires_grad_()))
        return copy.clone()  # the model may modify it in place

    def all_copied(owner: Owner, args: tuple, kwargs: dict, output: Any) -> Any:
        return tree_map(partial(copied, owner), output)

    shared = [owner for owner in owners if owner.returned_unbatched_output]
    with _after_calls((owner.module, partial(all_copied, owner)) for owner in shared), torch.enable_grad():
        # of the second example: the copies that are read by mistake are the first one's or the last one's
        loss = losses_of(batch)[1]
        if not copies or not loss.requires_grad:
            return []
        gradients = torch.autograd.grad(loss, [copy for _, copy in copies], allow_unused=True)
    own = torch.arange(batch) == 1
    each = zip(copies, gradients, strict=True)
    return list(dict.fromkeys(owner for (owner, _), g in each if g is not None and bool(to_local(g)[~own].any())))


def _same_at_all_positions(args: tuple, kwargs: dict, output: Any) -> Any:
    """Return an output with one vector at all positions of all examples, so that positions that are gathered by what
    they hold are gathered all together, or none."""

    def same(x: Any) -> Any:
        if not (isinstance(x, torch.Tensor) and x.is_floating_point() and x.dim() > 1 and x.numel()) or is_dtensor(x):
            return x
        return x.reshape(-1, x.shape[-1])[0].expand_as(x).clone()

    return tree_map(same, output)


def discover_owners(
    model: nn.Module,
    owners: list[Owner],
    parameters: Sequence[nn.Parameter],
    losses_of: Callable[[int, bool, bool], torch.Tensor],
    tapped: Callable[[], Any],
    batch_sizes: tuple[int, int],
    positions: set[int],
    shards: Shards,
) -> None:
    """Assign parameters to parents, in place, until every use is inside a call whose outputs have a batch dimension,
    and learn the batch dimensions.

    A module that is given gathered positions (an expert, a layer for the tokens of an image) may get exactly one of
    each example in all batches that are seen, and later as many as there are examples by chance. So one run has the
    same at all positions: such a module gets all of them, or none, and its parent owns its parameters.

    Args:
        losses_of: ``f(size, is_padded, is_same) -> (size,)`` losses of a batch of ``size`` examples, without taps. If
            it is padded, the masks of the first example end a position earlier. ``is_same`` puts the same numbers
            everywhere in each of the model's arguments. Calls may differ in their examples.
        tapped: Runs one forward pass with taps; raises if a copy for each example does not fit.
        batch_sizes: Two sizes that no other dimension has.
        positions: Possible numbers of positions of an example (:func:`positions_of`).

    Raises:
        UnownedParameterError: a parameter is used outside of the model's own call.
    """
    size, other_size = batch_sizes

    def run(size: int, is_padded: bool, is_same: bool = False) -> Run:
        with torch.no_grad(), _observed(owners) as calls:
            losses_of(size, is_padded, is_same)
        return size, calls

    def run_same() -> Run:
        for is_same in (True, False):
            try:
                with _after_calls((module, _same_at_all_positions) for module in model.modules()):
                    return run(other_size, True, is_same)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # each example must hold a token that ends it, or a matrix has no inverse
                shards.recover()
                logger.info("the model does not run with the same everywhere: %s: %s", type(error).__name__, error)
        return run(other_size, True)

    while True:
        with without_fused_attention():
            with _observed(owners) as calls:
                unowned = unowned_parameters(owners, parameters, lambda: losses_of(size, False, False), shards)
            for p in unowned:
                paths = [path for owner in owners if p in owner.names for path in owner.paths]
                if not paths:
                    raise UnownedParameterError(
                        "a trainable parameter is used and no module owns it: a forward pass freezes it "
                        "(requires_grad_(False)), or removes it from its module. Do that before training, or use "
                        "p.detach() there."
                    )
                assign_to_parent(model, owners, p, paths)
            if unowned:
                continue
            whole, padded, same = (size, calls), run(other_size, True), run_same()
            pairs = [(whole, padded), (whole, same)]
            # some models pass no mask if nothing is padded
            if not all(_have_same_structure(calls[owner], padded[1][owner]) for owner in owners):
                masked = run(size, True)
                pairs = [(whole, run(other_size, False)), (masked, padded), (masked, same)]
        lost = _learn_batch_dims(owners, pairs, positions)
        if not lost and any(owner.returned_unbatched_output for owner in owners):
            try:
                tapped()
                lost = _misread(owners, lambda size: losses_of(size, False, False), size)
            except Exception:
                lost = [owner for owner in owners if owner.returned_unbatched_output]
                if not lost:
                    raise
        if not lost:
            return
        reassign_owners(model, owners, lost)
