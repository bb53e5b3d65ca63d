"""Owners: the modules whose calls provide each parameter's per-example gradient.

An *owner* is a module together with trainable parameters whose gradients come from its calls. At first every module
owns the parameters that it holds directly. This is not enough if

* the module's forward is bypassed (a weight read by a functional call, a ``ParameterDict``, a parametrisation), or
* its output has no batch dimension (a table of relative positions, tokens of all examples sorted by expert), or
* giving each example a copy of a batch-less output does not fit the model, or the model reads another example's copy.

:func:`.discovery.discover_owners` detects these cases by running the model on two batch sizes, and assigns such
parameters to the *parent* module, and its parent, until every use of every parameter is inside a call whose outputs
have a batch dimension. An owner that covers its children goes through the fallback (:mod:`.fallback`), which is exact
and slower, with one warning.
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
    "DistributedDataParallel": "it averages gradients over processes before they are clipped: hand over the bare "
    "module; DPTrainer and PrivacyEngine sum over processes on their own, and after PerExampleClipper "
    "dp_transformers.runtime.distributed.sum_over_ranks does",
    "FullyShardedDataParallel": "its flat parameters hide which gradient is whose: use fully_shard (FSDP2)",
    "ScriptModule": "torch.jit compiled it, and its layers cannot be seen: pass the module that was compiled",
    "DeepSpeedEngine": "it averages and clips gradients on its own: hand over the bare module, after fully_shard "
    "(FSDP2) if it is too large",
}


def unsupported_wrapper_reason(module: nn.Module) -> str | None:
    """Return why gradients cannot be clipped inside this wrapper, and the way out; None if it is not such a
    wrapper."""
    return next((_WRAPPERS[cls.__name__] for cls in type(module).__mro__ if cls.__name__ in _WRAPPERS), None)


class Owner:
    """A module and the trainable parameters it owns, by their names relative to it."""

    def __init__(
        self, paths: Sequence[str], module: nn.Module, names: dict[nn.Parameter, str], *, covers_children: bool = False
    ):
        self.paths, self.module, self.names, self.covers_children = list(paths), module, names, covers_children
        found = rule_for(module)
        if covers_children:
            found = replace(found, norms=None) if found.covers_subtree else LayerRule()
        self.rule = found
        self.has_rule = found.terms is not None
        # it, or a part of it: its outputs and random numbers are kept
        self.may_be_rerun = not self.has_rule or found.takes_call
        self.needs_whole_batch = self.has_rule or found.norms is not None  # cannot run as in :mod:`.by_example`
        self.batch_dims: dict[tuple[int, int], list[BatchDim]] = {}
        self.known_ranks: set[tuple[int, ...]] | None = None  # ranks of the inputs seen; None: any are known
        self.is_called = True  # until discovery finds that it is not
        # for each kind of call, the batch dimensions of its input tensors and of all tensors that it returns
        self.tensor_batch_dims: dict[Hashable, tuple[list[BatchDim], list[BatchDim]]] = {}
        self.returned_unbatched_output = False
        # autograd's sequence number at the start of each call in progress; None once its parameters are tapped
        self.first_nodes: list[int | None] = []
        self.random_state: Any = None  # before the current call, for the fallback

    def __getstate__(self) -> dict[str, Any]:
        """Return only what the hooks of a copied model need (:class:`.hooks.HookedModel`): neither the random numbers
        of a call, which reveal its dropout masks, nor a rule, which need not be picklable."""
        return {"module": self.module, "first_nodes": []}

    @property
    def runs_by_example(self) -> bool:
        """True if its module runs one example at a time in the forward pass (:mod:`.by_example`)."""
        return not self.needs_whole_batch and bool(self.tensor_batch_dims)

    @property
    def is_rerun(self) -> bool:
        """True if it goes through the fallback: no rule gives its gradients, and it cannot run one example at a
        time."""
        return not (self.has_rule or self.runs_by_example) and self.is_called

    @property
    def path(self) -> str:
        return self.paths[0]

    def __str__(self) -> str:
        return named(self.path, self.module)

    def knows(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Return True if :func:`.discovery.discover_owners` saw a call with inputs of these ranks, so that their batch
        dimensions are known."""
        return self.known_ranks is None or tuple([x.dim() for x in inputs]) in self.known_ranks

    def batch_dims_of(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], batch: int
    ) -> list[BatchDim]:
        """Return the batch dimension of each input, then of each output, as :func:`.discovery.discover_owners` learned
        them for calls with as many tensors. In a call of which nothing was learned, it is the first dimension, or one
        of size 0 if the batch is empty."""
        if known := self.batch_dims.get((len(inputs), len(outputs))):
            return known
        empty = [x.shape.index(0) if batch == 0 and 0 in x.shape else 0 for x in (*inputs, *outputs)]
        return [BatchDim(dim) if dim else BATCH_FIRST for dim in empty]


def assign_owners(model: nn.Module) -> list[Owner]:
    """Make every module the owner of the parameters that it holds. A module without a rule does not own parameters
    that a module with a rule inside it holds too."""
    paths: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(path)
        if why := unsupported_wrapper_reason(module):
            where = f"'{path}'" if path else "the model"
            raise ValueError(f"{where} is a {type(module).__name__}: {why}.")
    owners = []
    covered = {child for m in paths if rule_for(m).covers_subtree for child in m.modules() if child is not m}
    for module, module_paths in paths.items():
        recurse = rule_for(module).covers_subtree
        names = {p: name for name, p in module.named_parameters(recurse=recurse) if p.requires_grad}
        if names and not _is_container(module) and module not in covered:
            owners.append(Owner(module_paths, module, names))
    held_by_rules = [(owner.module, set(owner.names)) for owner in owners if owner.has_rule]
    for owner in owners:
        if not owner.has_rule:
            inside = set(owner.module.modules())
            ruled = {p for module, names in held_by_rules if module in inside for p in names}
            owner.names = {p: name for p, name in owner.names.items() if p not in ruled}
    owners = [owner for owner in owners if owner.names]
    for module, module_paths in paths.items():
        if _is_container(module):
            for p in module.parameters(recurse=False):
                if p.requires_grad:
                    assign_to_parent(model, owners, p, module_paths)
    return owners


def warn_about_fallback(owners: Iterable[Owner]) -> None:
    """Warn once for each class of module that goes through the fallback."""
    slow: dict[type, list[Owner]] = {}
    for owner in owners:
        if owner.is_rerun:
            slow.setdefault(type(owner.module), []).append(owner)
    for cls, same in slow.items():
        names = sorted({name for owner in same for name in owner.names.values()})
        logger.warning(
            "%d %s (first: '%s') re-run one example at a time for the gradients of %s, which no rule covers: exact, "
            "slower.%s",
            len(same),
            cls.__name__,
            same[0].path,
            ", ".join(names[:4]) + (", ..." if len(names) > 4 else ""),
            _ways_out(same[0]),
        )


def _ways_out(owner: Owner) -> str:
    """Return advice on a faster use of the parameters of this module, one sentence for each kind of holder."""
    if not any(owner.module.children()):
        return ""
    found: dict[type, str] = {}
    for full_name in owner.names.values():
        path, _, name = full_name.rpartition(".")
        holder = owner.module.get_submodule(path)
        found.setdefault(type(holder), _way_out(holder, path, name))
    return " In code of your own that can be avoided. " + " ".join(found.values())


def _way_out(holder: nn.Module, path: str, name: str) -> str:
    """Return advice on how to use parameter ``name`` of ``holder``, at ``path``, in a call that returns the batch."""
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
    return f"Call '{path}' wherever its {name} is used."


def _is_container(module: nn.Module) -> bool:
    """Return True for modules that are never called, such as ParameterDict and ModuleList."""
    return type(module).forward is nn.Module.forward


def _parent(model: nn.Module, path: str) -> str | None:
    while path:
        path = path.rpartition(".")[0]
        if not _is_container(model.get_submodule(path)):
            return path
    return None


def assign_to_parent(model: nn.Module, owners: list[Owner], parameter: nn.Parameter, paths: Sequence[str]) -> None:
    """Make the next called modules above ``paths`` own ``parameter``, instead of any module below them."""
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
            f"{_way_out(holder, path, name)} If the model returns a loss, let it return the loss's inputs instead and "
            "compute the losses outside, or freeze the parameter (requires_grad_(False)) and train adapters such as "
            "LoRA."
        )
    outermost = {path for path in above if not any(_is_inside(path, top) for top in above if top != path)}
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
    """Make the parents of ``module``, which cannot be re-run, own its parameters, in place.

    Raises:
        UnownedParameterError: it has no parent.
    """
    reassign_owners(model, owners, [owner for owner in owners if owner.module is module])


def reassign_owners(model: nn.Module, owners: list[Owner], lost: Sequence[Owner]) -> None:
    """Make parents own the parameters of the ``lost`` owners, and of modules that share a list or dictionary with one
    of them and are of its class, as experts, or were not called, as heads for one task each: a batch may have no
    example for them, or an expert may have taken as many positions as there were examples."""
    for owner in lost:
        for p in list(owner.names):
            assign_to_parent(model, owners, p, owner.paths)
    modules = {owner.module for owner in lost}
    for container in [each for each in model.modules() if isinstance(each, (nn.ModuleList, nn.ModuleDict))]:
        classes = {type(child) for child in container.children() if child in modules}
        for child in container.children() if classes else ():
            inside = set(child.modules())
            held = [owner for owner in owners if owner.module in inside]
            if type(child) in classes or not any(owner.is_called for owner in held):
                paths = [path for path, each in model.named_modules(remove_duplicate=False) if each is child]
                for p in {p: None for owner in held for p in owner.names}:
                    assign_to_parent(model, owners, p, paths)


def refuse_escape(owners: Iterable[Owner], parameter: nn.Parameter, name: str) -> NoReturn:
    """Raise UnsupportedModuleError: ``parameter`` got a gradient that did not come through a call of its module, so it
    cannot be clipped."""
    innermost = max((owner for owner in owners if parameter in owner.names), key=lambda owner: len(owner.path))
    # the self-check then makes a parent own the parameter, if there is one
    raise UnsupportedModuleError(
        f"parameter '{name}' got a gradient that did not come through its module's call, so it cannot be clipped. "
        "Either the loss uses the parameter directly (a weight penalty: use the optimizer's weight_decay), or forward "
        "ran outside the model that is clipped, or forward read the weight or an inner activation without calling the "
        "module. Call the module for it, or freeze the parameter (requires_grad_(False)).",
        innermost.module,
    )
