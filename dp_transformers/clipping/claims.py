"""Who answers for which parameter: claims, and how they settle.

A *claim* is a module together with the trainable parameters it answers for: whoever calls the module leaves behind what is needed
for their per-example gradients. At first every module claims the parameters it owns directly. That is not enough where

* the module's forward is bypassed (a weight read by a functional call, a ``ParameterDict``, a parametrisation), or
* its output has no batch (a table of relative positions, tokens of all examples sorted by expert), or
* giving each example its copy of a batch-less output does not fit what the model does with it, or it reads another example's copy.

:func:`settle` finds out by running the model on two batches of different size, and lets the *parent* module answer, and its
parent, until every use of every parameter is seen by a module whose outputs have a batch. A claim taken over by a parent goes
through the fallback (:mod:`.fallback`): exact, slower, and said so once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from . import rules  # noqa: F401  (every layer has its rule)
from .errors import UnclaimedParameterError, ways_out
from .fallback import substituted, without_fused_attention
from .layer_rule import LayerRule, rule_for
from .layout import BATCH_FIRST, SHARED, Layout, learn_layout
from .parallel.dtensor import local
from .parallel.fsdp2 import Shards

logger = logging.getLogger(__name__)


_WRAPPERS = {
    "DataParallel": "its replicas cannot be clipped together: hand over the bare module, and start one process for each device",
    "DistributedDataParallel": "it averages gradients over processes that are not clipped yet: hand over the bare module; DPTrainer and "
    "PrivacyEngine add up over processes on their own, and after PerExampleClipper dp_transformers.distributed.sum_over_ranks does",
    "FullyShardedDataParallel": "its flat parameters hide which gradient is whose: use fully_shard (FSDP2)",
    "DeepSpeedEngine": "it averages and clips gradients on its own: hand over the bare module, after fully_shard (FSDP2) if it is too large",
}


def why_no_wrapper(module: nn.Module) -> str | None:
    """Why gradients cannot be clipped inside this one, which runs a model in several processes or devices, and the way out."""
    return next((_WRAPPERS[cls.__name__] for cls in type(module).__mro__ if cls.__name__ in _WRAPPERS), None)


class Claim:
    """A module and the trainable parameters it answers for, by their names relative to it."""

    def __init__(self, paths: Sequence[str], module: nn.Module, names: dict[nn.Parameter, str], *, taken_over: bool = False):
        self.paths, self.module, self.names, self.taken_over = list(paths), module, names, taken_over
        found = rule_for(module)
        if taken_over:
            found = replace(found, norms=None) if found.takes_call else LayerRule()
        self.rule = found
        self.layouts: dict[tuple[int, int], list[Layout]] = {}
        self.gave_single = False
        self.started: list[int] = []  # of the calls that run now, the number of autograd's next node then
        self.random_state: Any = None  # before the call that runs now, for the fallback

    def __getstate__(self) -> dict[str, Any]:
        """Without the random numbers of the call that runs: whoever has them knows its dropout masks."""
        return {**vars(self), "random_state": None, "started": []}

    @property
    def path(self) -> str:
        return self.paths[0]

    @property
    def may_be_rerun(self) -> bool:
        """Whether its gradients come from running the module again, or parts of it: what it gave and its random numbers are kept."""
        return self.is_rerun or self.rule.takes_call

    @property
    def is_rerun(self) -> bool:
        """Whether no rule gives its gradients, so that they come from the fallback."""
        return self.rule.terms is None

    def __str__(self) -> str:
        return f"'{self.path}' ({type(self.module).__name__})"

    def layouts_of(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> list[Layout]:
        """As :func:`settle` saw them for a call of this kind, inputs first; what it did not see is taken to have a batch."""
        return self.layouts.get((len(inputs), len(outputs))) or [BATCH_FIRST] * (len(inputs) + len(outputs))


def claim_parameters(model: nn.Module) -> list[Claim]:
    """Every module claims what it owns; a module without a rule only what no rule answers for."""
    paths: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(path)
        if why := why_no_wrapper(module):
            where = f"'{path}'" if path else "the model"
            raise ValueError(f"{where} is a {type(module).__name__}: {why}.")
    claims = []
    below_whole_calls = {child for m in paths if rule_for(m).takes_call for child in m.modules() if child is not m}
    for module, its_paths in paths.items():
        recurse = rule_for(module).takes_call
        names = {p: name for name, p in module.named_parameters(recurse=recurse) if p.requires_grad}
        if names and not _is_container(module) and module not in below_whole_calls:
            claims.append(Claim(its_paths, module, names))
    ruled = {p for claim in claims if not claim.is_rerun for p in claim.names}
    for claim in claims:
        if claim.is_rerun:
            claim.names = {p: name for p, name in claim.names.items() if p not in ruled}
    claims = [claim for claim in claims if claim.names]
    for module, its_paths in paths.items():
        if _is_container(module):
            for p in module.parameters(recurse=False):
                if p.requires_grad:
                    _hand_up(model, claims, p, its_paths)
    return claims


def announce(claims: Iterable[Claim]) -> None:
    """Warn once for each class of module that goes through the fallback."""
    slow: dict[type, list[Claim]] = {}
    for claim in claims:
        if claim.is_rerun:
            slow.setdefault(type(claim.module), []).append(claim)
    for cls, its_claims in slow.items():
        names = sorted({name for claim in its_claims for name in claim.names.values()})
        logger.warning(
            "%d %s (first: '%s') re-run one example at a time for the gradients of %s, which no rule covers: exact, slower.",
            len(its_claims),
            cls.__name__,
            its_claims[0].path,
            ", ".join(names[:4]) + (", ..." if len(names) > 4 else ""),
        )


def _is_container(module: nn.Module) -> bool:
    """ParameterDict, ModuleList and their like are never called."""
    return type(module).forward is nn.Module.forward


def _parent(model: nn.Module, path: str) -> str | None:
    while path:
        path = path.rpartition(".")[0]
        if not _is_container(model.get_submodule(path)):
            return path
    return None


def _hand_up(model: nn.Module, claims: list[Claim], parameter: nn.Parameter, paths: Sequence[str]) -> None:
    """Let the next modules above ``paths`` that are called answer for ``parameter``, and nobody below them."""
    above = {_parent(model, path) for path in paths}
    if None in above:
        name, owner = next(
            (f"{path}.{name}".lstrip("."), module)
            for path, module in model.named_modules()
            for name, p in module.named_parameters(recurse=False)
            if p is parameter
        )
        raise UnclaimedParameterError(
            f"parameter '{name}' of {type(owner).__name__} is used where no module sees it whose output has a batch, so its per-example "
            f"gradient cannot be bounded. {ways_out(name.rpartition('.')[0], owner)}"
        )
    outermost = {path for path in above if not any(_is_inside(path, other) for other in above if other != path)}
    for claim in claims:
        if parameter in claim.names and all(any(_is_inside(path, top) for top in outermost) for path in claim.paths):
            del claim.names[parameter]
    for module in {model.get_submodule(path): None for path in outermost}:
        claim = next((c for c in claims if c.module is module and c.taken_over), None)
        if claim is None:
            claim = Claim([path for path in outermost if model.get_submodule(path) is module], module, {}, taken_over=True)
            claims.append(claim)
        claim.names[parameter] = next(name for name, p in module.named_parameters(remove_duplicate=False) if p is parameter)
    claims[:] = [claim for claim in claims if claim.names]


def _is_inside(path: str, top: str) -> bool:
    return path == top or not top or path.startswith(top + ".")


def give_up(model: nn.Module, claims: list[Claim], module: nn.Module) -> None:
    """Let the parents of ``module``, which cannot be re-run, answer instead of it, in place.

    Raises:
        UnclaimedParameterError: there is none.
    """
    for claim in [claim for claim in claims if claim.module is module]:
        for p in list(claim.names):
            _hand_up(model, claims, p, claim.paths)


# ---- settling ----


@contextmanager
def hidden_parameters(claims: Iterable[Claim], shards: Shards) -> Iterator[None]:
    """While a claimed module runs, it sees detached copies of the parameters it answers for."""
    handles: list[Any] = []
    open_: list[tuple[Claim, ExitStack]] = []

    def hide(claim: Claim) -> None:
        stack = ExitStack()
        wholes = [whole for p in claim.names for whole in shards.wholes(p)]
        stack.enter_context(substituted(claim.module, {p: p.detach() for p in wholes}))
        open_.append((claim, stack))

    def show(claim: Claim) -> None:
        while open_ and open_[-1][0] is claim:
            open_.pop()[1].close()

    try:
        for claim in claims:
            handles.append(claim.module.register_forward_pre_hook(lambda m, a, claim=claim: hide(claim)))
            # the hooks of one module run in the order opposite to that of hiding
            handles.append(claim.module.register_forward_hook(lambda m, a, o, claim=claim: show(claim), always_call=True, prepend=True))
        yield
    finally:
        while open_:
            open_.pop()[1].close()
        for handle in handles:
            handle.remove()


def escaping(
    claims: Sequence[Claim], parameters: Sequence[nn.Parameter], losses: Callable[[], torch.Tensor], shards: Shards
) -> list[nn.Parameter]:
    """The parameters that still get a gradient when every claimed module sees detached copies: used where nobody answers for them.

    Raises:
        ValueError: the losses depend on no trainable parameter at all.
    """
    wholes = [(p, whole) for p in parameters for whole in shards.wholes(p)]
    with hidden_parameters(claims, shards), torch.enable_grad():
        # a leaf of its own keeps the graph alive where nothing escapes
        total = losses().sum() + torch.zeros((), requires_grad=True, device=wholes[0][1].device)
        gradients = torch.autograd.grad(total, [whole for _, whole in wholes], allow_unused=True)
    return list(dict.fromkeys(p for (p, _), g in zip(wholes, gradients, strict=True) if g is not None))


def _shapes(structure: Any, *, floating: bool) -> list[torch.Size]:
    return [x.shape for x in tree_leaves(structure) if isinstance(x, torch.Tensor) and (x.is_floating_point() or not floating)]


def _observe(claims: Sequence[Claim], run: Callable[[], Any]) -> dict[Claim, list[tuple[list[torch.Size], list[torch.Size]]]]:
    seen: dict[Claim, list[tuple[list[torch.Size], list[torch.Size]]]] = {claim: [] for claim in claims}
    with ExitStack() as stack:
        for claim in claims:

            def note(module: nn.Module, args: tuple, kwargs: dict, output: Any, claim: Claim = claim) -> None:
                seen[claim].append((_shapes((args, kwargs), floating=False), _shapes(output, floating=True)))

            stack.callback(claim.module.register_forward_hook(note, with_kwargs=True).remove)
        run()
    return seen


def _learn_layouts(claims: Sequence[Claim], runs: Sequence[tuple[int, dict]], positions: set[int]) -> list[Claim]:
    """Set the layouts of every claim from two runs; the claims whose outputs cannot be told apart by example."""
    (batch, first), (other_batch, second) = runs
    lost = []
    for claim in claims:
        claim.layouts, claim.gave_single = {}, False
        if claim.rule.takes_call:
            continue  # it knows where its examples are
        calls, other_calls = first[claim], second[claim]
        if len(calls) != len(other_calls):
            lost.append(claim)
            continue
        for (ins, outs), (other_ins, other_outs) in zip(calls, other_calls, strict=True):
            if (len(ins), len(outs)) != (len(other_ins), len(other_outs)) or not outs:
                lost.append(claim)
                break
            layouts = [
                learn_layout(*shapes, batch, other_batch, positions)
                for shapes in zip([*ins, *outs], [*other_ins, *other_outs], strict=True)
            ]
            if claim.rule.tapped_inside:  # what is tapped there is batch first, if the module has a batch
                if any(
                    layout.batch_dim is None or x[layout.batch_dim] != batch for x, layout in zip(outs, layouts[len(ins) :], strict=True)
                ):
                    lost.append(claim)
                    break
                continue
            known = claim.layouts.setdefault((len(ins), len(outs)), layouts)
            if SHARED in layouts[len(ins) :] or known != layouts:
                lost.append(claim)
                break
            claim.gave_single |= any(x[:1] == (1,) for x in outs)
    return lost


def _misread(claims: Sequence[Claim], losses_of: Callable[[int], torch.Tensor], batch: int) -> list[Claim]:
    """The claims whose output for the whole batch, once every example has its copy, is not read by each example from its own.

    A table of relative positions is one: flattened, then indexed, it is the first example's copy that everybody reads.
    """
    copies: list[tuple[Claim, torch.Tensor]] = []

    def copied(claim: Claim, x: Any) -> Any:
        if not (isinstance(x, torch.Tensor) and x.is_floating_point() and x.shape[:1] == (1,)):
            return x
        copy = x.expand(batch, *x.shape[1:]).clone()
        copies.append((claim, copy if copy.requires_grad else copy.requires_grad_()))
        return copy.clone()  # the model may write to it

    with ExitStack() as stack, torch.enable_grad():
        for claim in claims:
            if claim.gave_single:
                hook = partial(lambda claim, module, args, output: tree_map(partial(copied, claim), output), claim)
                stack.callback(claim.module.register_forward_hook(hook).remove)
        loss = losses_of(batch)[1]  # neither of the first example nor of the last, whose copies are the ones read by mistake
        if not copies or not loss.requires_grad:
            return []
        gradients = torch.autograd.grad(loss, [copy for _, copy in copies], allow_unused=True)
    own = torch.arange(batch) == 1
    return list({claim: None for (claim, _), g in zip(copies, gradients, strict=True) if g is not None and bool(local(g)[~own].any())})


def settle(
    model: nn.Module,
    claims: list[Claim],
    parameters: Sequence[nn.Parameter],
    losses_of: Callable[[int], torch.Tensor],
    tapped: Callable[[], Any],
    batch_sizes: tuple[int, int],
    positions: set[int],
    shards: Shards,
) -> None:
    """Hand parameters up, in place, until every use is seen by a module whose outputs have a batch, and learn the layouts.

    Args:
        losses_of: ``f(size) -> (size,)`` losses of a batch of that many examples, without taps.
        tapped: One forward pass with taps; raises where a copy for each example does not fit.
        batch_sizes: Two sizes that no other dimension has.
        positions: How many positions an example may have (:func:`positions_of`).

    Raises:
        UnclaimedParameterError: a parameter is used where not even the model itself sees it.
    """
    while True:
        if wayward := escaping(claims, parameters, lambda: losses_of(batch_sizes[0]), shards):
            for p in wayward:
                _hand_up(model, claims, p, [path for c in claims if p in c.names for path in c.paths])
            continue
        with torch.no_grad(), without_fused_attention():
            runs = [(size, _observe(claims, lambda size=size: losses_of(size))) for size in batch_sizes]
        lost = _learn_layouts(claims, runs, positions)
        if not lost and any(claim.gave_single for claim in claims):
            try:
                tapped()
                lost = _misread(claims, losses_of, batch_sizes[0])
            except Exception:
                lost = [claim for claim in claims if claim.gave_single]
                if not lost:
                    raise
        if not lost:
            return
        for claim in lost:
            for p in list(claim.names):
                _hand_up(model, claims, p, claim.paths)
