"""Owners say which module's calls provide each parameter's per-example gradient.

An *owner* is a module together with trainable parameters whose gradients come from its calls. At first every module
owns the parameters that it holds directly. That is not enough where

* the module's forward is bypassed (a weight read by a functional call, a ``ParameterDict``, a parametrisation), or
* its output has no batch (a table of relative positions, tokens of all examples sorted by expert), or
* giving each example its copy of a batch-less output does not fit what the model does with it, or it reads another
  example's copy.

:func:`.discovery.discover_owners` finds that out by running the model on two batches of different size, and assigns
such parameters to the *parent* module, and its parent, until every use of every parameter is inside a call whose
outputs have a batch. An owner that covers its children goes through the fallback (:mod:`.fallback`): exact, slower,
and said so once.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import nn

from .batch_dims import BATCH_FIRST, BatchDim
from .errors import UnownedParameterError, UnsupportedModuleError, named
from .layer_rule import LayerRule, rule_for

logger = logging.getLogger(__name__)
_WRAPPERS = {
    "DataParallel": "its replicas cannot be clipped together: hand over the bare module, and start one process for "
    "each device",
    "DistributedDataParallel": "it averages gradients over processes that are not clipped yet: hand over the bare "
    "module; DPTrainer and "
    "PrivacyEngine add up over processes on their own, and after PerExampleClipper "
    "dp_transformers.runtime.distributed.sum_over_ranks does",
    "FullyShardedDataParallel": "its flat parameters hide which gradient is whose: use fully_shard (FSDP2)",
    "ScriptModule": "torch.jit compiled it, and its layers cannot be seen: pass the module that was compiled",
    "DeepSpeedEngine": "it averages and clips gradients on its own: hand over the bare module, after fully_shard "
    "(FSDP2) if it is too large",
}


def unsupported_wrapper_reason(module: nn.Module) -> str | None:
    """Why gradients cannot be clipped inside this one, which runs a model in several processes or devices, or compiled
    it, and the way out."""
    return next((_WRAPPERS[cls.__name__] for cls in type(module).__mro__ if cls.__name__ in _WRAPPERS), None)


class Owner:
    """A module and the trainable parameters it owns, by their names relative to it."""

    def __init__(
        self, paths: Sequence[str], module: nn.Module, names: dict[nn.Parameter, str], *, covers_children: bool = False
    ):
        self.paths, self.module, self.names, self.covers_children = list(paths), module, names, covers_children
        found = rule_for(module)
        if covers_children:
            found = replace(found, norms=None) if found.is_of_all_below else LayerRule()
        self.rule = found
        self.has_rule = found.terms is not None
        # or parts of it: its outputs and random numbers are kept
        self.may_be_rerun = not self.has_rule or found.takes_call
        self.needs_whole_batch = self.has_rule or found.norms is not None  # cannot run as in :mod:`.by_example`
        self.batch_dims: dict[tuple[int, int], list[BatchDim]] = {}
        self.known_ranks: set[tuple[int, ...]] | None = None  # of what it is given; None: calls of any kind are known
        self.is_called = True  # as far as is known
        # by the kind of a call: where the tensors that it is given, and all that it returns, have their examples
        self.tensor_batch_dims: dict[Hashable, tuple[list[BatchDim], list[BatchDim]]] = {}
        self.returned_unbatched_output = False
        # autograd's sequence number at the start of each call in progress; None once its parameters are tapped
        self.first_nodes: list[int | None] = []
        self.random_state: Any = None  # before the call that runs now, for the fallback

    def __getstate__(self) -> dict[str, Any]:
        """What hooks that do nothing need (:class:`.hooks.HookedModel`): copies and pickles of a model carry neither
        the random numbers of a call, by which its dropout masks are known, nor a rule, which need not be picklable."""
        return {"module": self.module, "first_nodes": []}

    @property
    def runs_by_example(self) -> bool:
        """True if its module runs one example at a time in the forward pass (:mod:`.by_example`)."""
        return not self.needs_whole_batch and bool(self.tensor_batch_dims)

    @property
    def is_rerun(self) -> bool:
        """True if no rule gives its gradients and it cannot run one example at a time, so that the fallback does."""
        return not (self.has_rule or self.runs_by_example) and self.is_called

    @property
    def path(self) -> str:
        return self.paths[0]

    def __str__(self) -> str:
        return named(self.path, self.module)

    def knows(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Returns whether a call with these was seen by :func:`.discovery.discover_owners`, as far as their numbers of
        dimensions say, so that it is known where they have their examples."""
        return self.known_ranks is None or tuple(x.dim() for x in inputs) in self.known_ranks

    def batch_dims_of(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], batch: int
    ) -> list[BatchDim]:
        """Returns what :func:`.discovery.discover_owners` saw for a call of this kind, inputs first; what it did not
        see is taken to have a batch. Before it saw anything, an empty batch is where there is nothing."""
        if known := self.batch_dims.get((len(inputs), len(outputs))):
            return known
        empty = [x.shape.index(0) if batch == 0 and 0 in x.shape else 0 for x in (*inputs, *outputs)]
        return [BatchDim(dim) if dim else BATCH_FIRST for dim in empty]


def assign_owners(model: nn.Module) -> list[Owner]:
    """Every module owns the parameters it holds; one without a rule only those that no module with a rule holds
    too."""
    paths: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(path)
        if why := unsupported_wrapper_reason(module):
            where = f"'{path}'" if path else "the model"
            raise ValueError(f"{where} is a {type(module).__name__}: {why}.")
    owners = []
    below_whole_calls = {
        child for m in paths if rule_for(m).is_of_all_below for child in m.modules() if child is not m
    }
    for module, its_paths in paths.items():
        recurse = rule_for(module).is_of_all_below
        names = {p: name for name, p in module.named_parameters(recurse=recurse) if p.requires_grad}
        if names and not _is_container(module) and module not in below_whole_calls:
            owners.append(Owner(its_paths, module, names))
    held_by_rules = [(owner.module, set(owner.names)) for owner in owners if owner.has_rule]
    for owner in owners:
        if not owner.has_rule:  # what a module with a rule in it holds too is used there
            inside = set(owner.module.modules())
            ruled = {p for module, names in held_by_rules if module in inside for p in names}
            owner.names = {p: name for p, name in owner.names.items() if p not in ruled}
    owners = [owner for owner in owners if owner.names]
    for module, its_paths in paths.items():
        if _is_container(module):
            for p in module.parameters(recurse=False):
                if p.requires_grad:
                    assign_to_parent(model, owners, p, its_paths)
    return owners


def warn_about_fallback(owners: Iterable[Owner]) -> None:
    """Warn once for each class of module that goes through the fallback."""
    slow: dict[type, list[Owner]] = {}
    for owner in owners:
        if owner.is_rerun:
            slow.setdefault(type(owner.module), []).append(owner)
    for cls, its_owners in slow.items():
        names = sorted({name for owner in its_owners for name in owner.names.values()})
        logger.warning(
            "%d %s (first: '%s') re-run one example at a time for the gradients of %s, which no rule covers: exact, "
            "slower.%s",
            len(its_owners),
            cls.__name__,
            its_owners[0].path,
            ", ".join(names[:4]) + (", ..." if len(names) > 4 else ""),
            _ways_out(its_owners[0]),
        )


def _ways_out(owner: Owner) -> str:
    """How the parameters that this module owns can be used faster, by an example of each kind."""
    if not any(owner.module.children()):  # which does nothing but use them
        return ""
    found: dict[type, str] = {}
    for full_name in owner.names.values():
        path, _, name = full_name.rpartition(".")
        holder = owner.module.get_submodule(path)
        found.setdefault(type(holder), _way_out(holder, path, name))
    return " In code of your own that can be avoided. " + " ".join(found.values())


def _way_out(holder: nn.Module, path: str, name: str) -> str:
    """How parameter ``name`` of ``holder``, at ``path``, can be used in a call that returns the batch."""
    if isinstance(holder, nn.Embedding):
        attribute = path.rpartition(".")[2]
        return (
            f"Call '{path}' with ids that have a batch dimension, positions too: {attribute}(ids.unsqueeze(0)), or "
            f"{attribute}(ids.expand(B, T))."
        )
    if _is_container(holder) or any(holder.children()):
        where = f"'{path}.{name}'" if path else f"'{name}'"
        return (
            f"Use {where} in a small module of its own, which is given the batch and returns it: "
            "def forward(self, x): return x + self.pos."
        )
    return f"Call '{path}' for what is computed with its {name}."


def _is_container(module: nn.Module) -> bool:
    """ParameterDict, ModuleList and their like are never called."""
    return type(module).forward is nn.Module.forward


def _parent(model: nn.Module, path: str) -> str | None:
    while path:
        path = path.rpartition(".")[0]
        if not _is_container(model.get_submodule(path)):
            return path
    return None


def assign_to_parent(model: nn.Module, owners: list[Owner], parameter: nn.Parameter, paths: Sequence[str]) -> None:
    """Let the next modules above ``paths`` that are called own ``parameter``, and no module below them."""
    parents = [_parent(model, path) for path in paths]
    above = {parent for parent in parents if parent is not None}
    if None in parents:
        path, name, holder = next(
            (path, name, module)
            for path, module in model.named_modules()
            for name, p in module.named_parameters(recurse=False)
            if p is parameter
        )
        full_name = f"{path}.{name}".lstrip(".")
        raise UnownedParameterError(
            f"parameter '{full_name}' of {type(holder).__name__} is used outside of every module that returns a "
            "tensor with the batch in it, so its gradient per example cannot be bounded. "
            f"{_way_out(holder, path, name)} Where the model returns a loss, let it return what the loss is computed "
            "from, and compute the losses outside. "
            "Or freeze the parameter (requires_grad_(False)) and train adapters such as LoRA."
        )
    outermost = {path for path in above if not any(_is_inside(path, other) for other in above if other != path)}
    for owner in owners:
        if parameter in owner.names and all(any(_is_inside(path, top) for top in outermost) for path in owner.paths):
            del owner.names[parameter]
    for module in {model.get_submodule(path): None for path in outermost}:
        owner = next((c for c in owners if c.module is module and (c.covers_children or not c.has_rule)), None)
        if owner is None:
            owner = Owner(
                [path for path in outermost if model.get_submodule(path) is module], module, {}, covers_children=True
            )
            owners.append(owner)
        elif not owner.has_rule:
            owner.covers_children, owner.rule = True, LayerRule()
        owner.names[parameter] = next(
            name for name, p in module.named_parameters(remove_duplicate=False) if p is parameter
        )
    owners[:] = [owner for owner in owners if owner.names]


def _is_inside(path: str, top: str) -> bool:
    return path == top or not top or path.startswith(top + ".")


def reassign_to_parents(model: nn.Module, owners: list[Owner], module: nn.Module) -> None:
    """Let the parents of ``module``, which cannot be re-run, own its parameters, in place.

    Raises:
        UnownedParameterError: there is none.
    """
    lost = [owner for owner in owners if owner.module is module]
    for owner in lost + uncalled_beside(model, owners, lost):
        for p in list(owner.names):
            assign_to_parent(model, owners, p, owner.paths)


def uncalled_beside(model: nn.Module, owners: Iterable[Owner], lost: Iterable[Owner]) -> list[Owner]:
    """The owners that were not called, and stand in a list or dictionary of modules beside one that is ``lost``: heads
    for one task each, say, of which a batch may have no example."""
    modules = {owner.module for owner in lost}
    containers = (each for each in model.modules() if isinstance(each, (nn.ModuleList, nn.ModuleDict)))
    beside = {child for each in containers if not modules.isdisjoint(each.children()) for child in each.children()}
    return [owner for owner in owners if owner.module in beside - modules and not owner.is_called]


def refuse_escape(owners: Iterable[Owner], parameter: nn.Parameter, name: str) -> NoReturn:
    """Raise UnsupportedModuleError: a gradient reached ``parameter``, called ``name``, past the calls of its
    owners."""
    innermost = max((owner for owner in owners if parameter in owner.names), key=lambda owner: len(owner.path))
    # the self-check then lets a parent own the parameter, where there is one that sees it
    raise UnsupportedModuleError(
        f"parameter '{name}' got a gradient that did not come through its module's call, so it cannot be clipped. "
        "Either the loss uses the parameter directly (a weight penalty: use the optimizer's weight_decay), or forward "
        "ran outside the model that is clipped, or forward read the weight or an inner activation without calling the "
        "module. Call the module for it, or freeze the parameter (requires_grad_(False)).",
        innermost.module,
    )
