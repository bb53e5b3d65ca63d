"""Who answers for which parameter: claims, and how they settle.

A *claim* is a module together with the trainable parameters it answers for: whoever calls the module leaves behind what is needed
for their per-example gradients. At first every module claims the parameters it owns directly. That is not enough where

* the module's forward is bypassed (a weight read by a functional call, a ``ParameterDict``, a parametrisation), or
* its output has no batch (a table of relative positions, tokens of all examples sorted by expert), or
* giving each example its copy of a batch-less output does not fit what the model does with it, or it reads another example's copy.

:func:`.discovery.settle` finds out by running the model on two batches of different size, and lets the *parent* module answer, and its
parent, until every use of every parameter is seen by a module whose outputs have a batch. A claim taken over by a parent goes
through the fallback (:mod:`.fallback`): exact, slower, and said so once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from . import rules  # noqa: F401  (every layer has its rule)
from .errors import UnclaimedParameterError, ways_out
from .layer_rule import LayerRule, rule_for
from .layout import BATCH_FIRST, Layout

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
        self.is_rerun = found.terms is None  # no rule gives its gradients, so the fallback does
        self.may_be_rerun = self.is_rerun or found.takes_call  # or parts of it: its outputs and random numbers are kept
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
                    hand_up(model, claims, p, its_paths)
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


def hand_up(model: nn.Module, claims: list[Claim], parameter: nn.Parameter, paths: Sequence[str]) -> None:
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
            hand_up(model, claims, p, claim.paths)
