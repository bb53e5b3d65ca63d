"""The hooks of one model, which pass on its forward passes and every call of a module that owns parameters to an
:class:`Observer`. They know no gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..runtime.randomness import random_state
from .by_example import ForwardByExample
from .errors import UnsupportedModuleError, refuse_tracing
from .layer_rule import ForwardContext, Tap, forward_context_for
from .owners import Owner
from .recorded_call import differentiable_leaves


class Observer(Protocol):
    """What a hooked model passes on to whoever records its forward passes."""

    def begin_forward(self, args: tuple, kwargs: dict) -> bool:
        """Called before the model runs with a graph. Returns whether calls are to be passed on."""

    def record(self, owner: Owner, args: tuple, kwargs: dict, output: Any, first_node: int) -> Any:
        """Called after each call of a module that owns parameters. Returns the output to go on with, None for the
        same."""

    def run_by_example(self, owner: Owner, function: Callable, args: tuple, kwargs: dict) -> tuple[bool, Any]:
        """Called in the place of ``function(*args, **kwargs)``, the forward of an owner that is to run one example at
        a time. Returns whether it did, and the output."""

    def end_forward(self, args: tuple, kwargs: dict, output: Any) -> Any:
        """Called after a forward pass whose calls were passed on. Returns the output to go on with, None for the
        same."""

    def refuse_native_gradient(self, parameter: nn.Parameter) -> None:
        """Called when autograd has filled a gradient by itself. May raise."""

    def without_graph(self) -> contextlib.AbstractContextManager:
        """Returns a context in which the model runs without a graph."""


class HookedModel:
    """A model with hooks, while it is attached.

    Args:
        observer: It is told of calls and outputs.

    Attributes:
        in_backward: Set while calls are passed on that run inside backward, where activation checkpointing recomputes
            them.
    """

    _is_copy = False

    def __init__(self, model: nn.Module, observer: Observer):
        self.model, self._observer = model, observer
        self.in_backward = False
        self._owners: Iterable[Owner] = ()
        self._gathers = False
        self._handles: list[Any] = []
        self._in_forward = False
        self._suspended = False
        self._opened: list[tuple[nn.Module, contextlib.AbstractContextManager]] = []
        self._configs: list[Any] = []  # those that say whether the model fills a cache
        self._around = contextlib.ExitStack()  # the call of the model

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles of a hooked model carry hooks that do nothing: no data, no gradient and no secret goes
        with them."""
        inert = {"_is_copy": True, "_suspended": True, "_in_forward": False, "in_backward": False}
        return inert | {"_owners": (), "_opened": [], "_configs": [], "_around": contextlib.ExitStack()}

    @property
    def are_installed(self) -> bool:
        return bool(self._handles)

    def install(self, owners: Iterable[Owner], parameters: Iterable[nn.Parameter], *, gathers: bool) -> None:
        """Hook the model anew.

        Args:
            gathers: The model has hooks of its own that gather parameters, and must not be run inside those.
        """
        self._remove_handles()
        _refuse_packed(self.model)
        keep_unpacked(self.model)
        self._owners, self._gathers, self._configs = owners, gathers, configurations(self.model)
        handles = [self.model.register_forward_pre_hook(self._before_model, with_kwargs=True, prepend=gathers)]
        for owner in owners:
            before_call = self._before_call_inside if owner.rule.tapped_inside else self._before_call
            handles.append(owner.module.register_forward_pre_hook(partial(before_call, owner), prepend=True))
            if owner.rule.tapped_inside:
                continue
            # before the user's hooks, so that what they do to the output happens after the tap and is differentiated
            # by autograd
            handles.append(
                owner.module.register_forward_hook(partial(self._after_call, owner), with_kwargs=True, prepend=True)
            )
            if owner.may_be_rerun:
                handles.append(owner.module.register_forward_pre_hook(partial(self._keep_random_state, owner)))
            if owner.runs_by_example:
                vars(owner.module)["forward"] = ForwardByExample(owner, self._forward)
        frozen = [m for m in self.model.modules() if is_frozen_batch_norm(m)]
        handles += [m.register_forward_pre_hook(_fix) for m in frozen]
        handles += [p.register_post_accumulate_grad_hook(self._after_gradient) for p in parameters]
        taps = {owner.module: partial(self._after_call, owner) for owner in owners if owner.rule.tapped_inside}
        for module in self.model.modules():
            context = forward_context_for(module)
            if context and any(p.requires_grad for p in module.parameters()):
                handles.append(module.register_forward_pre_hook(partial(self._open, context, taps.get(module))))
                handles.append(module.register_forward_hook(self._close, always_call=True, prepend=True))
        handles.append(self.model.register_forward_hook(self._after_model, with_kwargs=True, always_call=True))
        self._handles = handles

    def remove(self) -> None:
        self._remove_handles()
        self.reset()

    def _remove_handles(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for module in self.model.modules():
            if isinstance(vars(module).get("forward"), ForwardByExample):
                del vars(module)["forward"]

    def reset(self) -> None:
        """Undo what an interrupt may have left inside a module."""
        while self._opened:
            self._opened.pop()[1].__exit__(None, None, None)
        self._around.close()

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside, the model runs as if it had no hooks."""
        before, self._suspended = self._suspended, True
        try:
            yield
        finally:
            self._suspended = before

    # ---- the model ----

    def _before_model(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if self._suspended:
            return
        refuse_tracing()
        if not torch.is_grad_enabled():
            self._around.enter_context(self._observer.without_graph())
            return
        handles = self._handles
        if not self._observer.begin_forward(args, kwargs):
            return
        self._in_forward = True
        if kwargs.get("past_key_values") is None:
            self._around.enter_context(without_caches(self._configs))
        for owner in [owner for owner in self._owners if owner.module is module]:
            if self._handles is not handles:  # new hooks, which come too late for the call that is going on
                self._before_call(owner, module, args)
                if owner.may_be_rerun:
                    owner.random_state = random_state(next(iter(owner.names)).device)
            elif not (owner.first_nodes or owner.rule.tapped_inside):  # a check ran the model in this call
                self._before_call(owner, module, args)

    def _after_model(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        recorded, self._in_forward = self._in_forward and output is not None, False  # None: it raised
        for owner in self._owners:
            owner.first_nodes.clear()  # of calls that raised
        self._around.close()
        return self._observer.end_forward(args, kwargs, output) if recorded else None

    # ---- modules that own parameters ----

    def _before_call(self, owner: Owner, module: nn.Module, args: tuple) -> None:
        refuse_tracing()
        owner.first_nodes.append(torch.autograd._get_sequence_nr())
        if (self._in_forward or self.in_backward) and not self._suspended and torch.is_grad_enabled():
            self._require_own_parameters(owner)

    def _before_call_inside(self, owner: Owner, module: nn.Module, args: tuple) -> None:
        """:meth:`_before_call` of a module whose tap is inside, which is not reached elsewhere."""
        if self._looks_inside:
            self._before_call(owner, module, args)

    def _require_own_parameters(self, owner: Owner) -> None:
        """Raise UnsupportedModuleError if the call would compute with other parameters than those whose gradient is
        clipped. The self-check then lets a parent own them, where there is one."""
        for p, name in owner.names.items():
            used = _held(owner.module, name, p if owner.runs_by_example else None)
            if (used is not p and not self._gathers) or not p.requires_grad:
                raise UnsupportedModuleError(
                    f"{owner} is called with '{name}' frozen or replaced for this call, inside the model's forward "
                    "pass, so its gradient would not be that of what is computed. Freeze or replace parameters before "
                    "training, and run a part that is not trained under torch.no_grad().",
                    owner.module,
                )

    def _keep_random_state(self, owner: Owner, module: nn.Module, args: tuple) -> None:
        if not (self._suspended or owner.runs_by_example):
            owner.random_state = random_state(next(iter(owner.names)).device)

    def _forward(self, owner: Owner, function: Callable, args: tuple, kwargs: dict) -> Any:
        is_recorded = (self._in_forward or self.in_backward) and not self._suspended and torch.is_grad_enabled()
        if not (is_recorded and owner.runs_by_example):
            return function(*args, **kwargs)
        ran, output = self._observer.run_by_example(owner, function, args, kwargs)
        if ran:
            owner.first_nodes[-1] = None
        return output

    def _after_call(self, owner: Owner, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        first_node = owner.first_nodes.pop()
        if self._suspended or first_node is None:  # its parameters were tapped
            return None
        if self._in_forward or self.in_backward:
            return self._observer.record(owner, args, kwargs, output, first_node)
        differentiated = [x for x in differentiable_leaves(output) if x.grad_fn is not None]
        if differentiated and torch.jit.is_tracing():
            raise ValueError(
                f"torch.jit traces {owner}, and what it makes of it has no hooks, so that no gradient of it would be "
                "clipped. Train the model as it is, and trace it afterwards, or under torch.no_grad() a copy of it."
            )
        for x in differentiated:
            x.register_hook(partial(_refuse_gradient, owner))
        return None

    @property
    def _looks_inside(self) -> bool:
        """Whether modules run in the context of their rule. Elsewhere there is no graph, and torch's fast paths may
        run, which know no such context; of a forward pass that is clipped reentrant activation checkpointing runs
        parts without a graph, too."""
        return torch.is_grad_enabled() or self._in_forward or not torch.backends.mha.get_fastpath_enabled()

    def _open(self, context: ForwardContext, tap: Tap | None, module: nn.Module, args: tuple) -> None:
        if not self._looks_inside:
            return
        opened = context(module, tap)
        opened.__enter__()
        self._opened.append((module, opened))

    def _close(self, module: nn.Module, args: tuple, output: Any) -> None:
        if self._opened and self._opened[-1][0] is module:
            self._opened.pop()[1].__exit__(None, None, None)

    def _after_gradient(self, parameter: nn.Parameter) -> None:
        if not self._suspended:
            self._observer.refuse_native_gradient(parameter)


def _refuse_gradient(owner: Owner, gradient: torch.Tensor) -> NoReturn:
    raise ValueError(
        f"{owner} was called outside the forward of the model that is being clipped, and a gradient through that call "
        "would not be clipped. Call the model itself, or use torch.no_grad(); for a loss that is not the private one, "
        "go forward and backward inside 'with engine.suspended():' (of a PerExampleClipper: clipper.suspended())."
    )


def _held(module: nn.Module, name: str, default: nn.Parameter | None) -> Any:
    """What the module, or a part of it, has as the parameter of this name."""
    path, _, last = name.rpartition(".")
    for part in path.split(".") if path else ():
        found = module._modules.get(part)
        if found is None:
            return default
        module = found
    return module._parameters.get(last, default)


_PACKS = "support_avx512bf16_for_cpu"  # of a layer of bitsandbytes


def keep_unpacked(model: nn.Module | None) -> None:
    """Keep 4-bit layers of bitsandbytes from packing their weights, as they do on some CPUs when they evaluate: no
    gradient goes back through what is packed. They stay as they are after the training, too."""
    for module in () if model is None else model.modules():
        if hasattr(module, _PACKS):
            setattr(module, _PACKS, False)


def _refuse_packed(model: nn.Module) -> None:
    """Raise ValueError if a weight was packed, even if it was unpacked again: that does not restore its scales."""
    for name, module in model.named_modules():
        if hasattr(getattr(getattr(module, "weight", None), "quant_state", None), "packing_format_for_cpu"):
            raise ValueError(
                f"bitsandbytes packed the weights of '{name}' when the model evaluated or generated, and no gradient "
                "goes back through them. Load the model anew, and make it private before it evaluates."
            )


def is_frozen_batch_norm(module: nn.Module) -> bool:
    """Return True for a batch normalization that is not trained, as in a frozen backbone. Attached, it keeps the
    statistics that it has, whatever mode it is in."""
    trained = [p.requires_grad for p in module.parameters()]
    return isinstance(module, _BatchNorm) and module.running_mean is not None and trained != [] and not any(trained)


def _fix(frozen: nn.Module, args: tuple) -> None:
    """Hold a frozen layer in the mode in which it keeps what it has."""
    frozen.training = False


def refuse_attached(model: nn.Module) -> None:
    """Raise ValueError if a clipper, that of an engine or a trainer included, is attached to ``model`` or a part of
    it."""
    for path, module in model.named_modules():
        for hook in module._forward_pre_hooks.values():
            hooked = getattr(hook, "__self__", None)
            if isinstance(hooked, HookedModel) and not hooked._is_copy:
                where = f"'{path}' of the model" if path else "this model"
                raise ValueError(
                    f"another PerExampleClipper is attached to {where}, of an earlier make_private or made by hand: "
                    "call detach() of that engine or clipper first, or go on with it."
                )


# ---- caches ----

# Models of transformers fill caches of keys, values and states by default, even in training, where nothing reads them.
# They take memory, and a module that fills one cannot be re-run, nor can the modules above it. So they are off while a
# batch is clipped, unless the call itself asks for them.
_SWITCHES = ("use_cache", "use_mems_eval", "use_mems_train")  # the last two are XLNet's


def configurations(model: nn.Module) -> list[Any]:
    """Return the configurations of the model and of its parts that have a switch for a cache."""
    found = {id(config): config for m in model.modules() if (config := vars(m).get("config")) is not None}
    return [c for c in found.values() if any(isinstance(getattr(c, name, None), bool) for name in _SWITCHES)]


@contextlib.contextmanager
def without_caches(configs: Iterable[Any]) -> Iterator[None]:
    """Switch the caches of these configurations off inside the context."""
    used = [(config, name) for config in configs for name in _SWITCHES if getattr(config, name, None) is True]
    try:
        for config, name in used:
            setattr(config, name, False)
        yield
    finally:
        for config, name in used:
            setattr(config, name, True)
