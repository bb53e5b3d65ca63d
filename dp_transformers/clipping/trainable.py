"""The trainable parameters of a model, their split over ranks, and their precision."""

from __future__ import annotations

import torch
from torch import nn

from .parallel.fsdp2 import Shards
from .parallel.tensor_parallel import TensorParallel
from .precision import HALF, TRAINABLE


class TrainableParameters:
    """The trainable parameters of ``model`` when it is attached.

    Raises:
        ValueError: there are none, or clipping would not be exact for their split or precision.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.shards = Shards(model)
        self.parallel = TensorParallel(model, self.shards)
        self._names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self.parameters = list(self._names)
        if not self.parameters:
            raise ValueError(
                "the model has no trainable parameter: set requires_grad on the parameters to train, or add adapters."
            )
        self._refuse_dtypes()
        self.parameter_of: dict[torch.Tensor, nn.Parameter] = {  # keys are the tensors in autograd's graph
            whole: p for p in self.parameters for whole in self.shards.all_unsharded(p)
        }
        half = [p.dtype for p in model.parameters() if p.dtype in HALF]
        # a frozen body in bf16 rounds the gradients that pass through it
        self.low_precision = half[0] if half else torch.float32
        self.convolves = any(isinstance(m, nn.modules.conv._ConvNd) for m in model.modules())
        self._ids, self._modules = _trainable_ids(model), list(model.modules())
        self._dtypes, self._shapes = [p.dtype for p in self.parameters], [p.shape for p in self.parameters]

    def _refuse_dtypes(self) -> None:
        split = bool(self.shards or self.parallel)
        for name, p in self.model.named_parameters():
            if p.requires_grad and (p.dtype not in TRAINABLE or (p.dtype == torch.bfloat16 and split)):
                wanted = "float32 where the model is sharded or tensor-parallel" if split else "float32 or bfloat16"
                raise ValueError(
                    f"parameter '{name}' is {p.dtype}, and a trained parameter must be {wanted}: load the model with "
                    "dtype=torch.float32 (frozen parameters may have any precision) and use bf16 autocast, or "
                    "MixedPrecisionPolicy under FSDP2, for speed."
                )

    @property
    def device(self) -> torch.device:
        """The device of the model's computations."""
        return self.shards.unsharded(self.parameters[0]).device

    def name_of(self, parameter: nn.Parameter) -> str:
        """The name that a parameter had when the model was attached, also while FSDP2 has it gathered."""
        return self._names.get(parameter, "?")

    def thaw(self) -> None:
        """Make all parameters trainable again, after a forward pass that raised an error."""
        for p in self.parameters:
            p.requires_grad = True

    def drop_gradients(self) -> None:
        for p in self.parameters:
            p.grad = None

    def find_gradient(self) -> nn.Parameter | None:
        """Return the first parameter that has a gradient."""
        return next((p for p in self.parameters if p.grad is not None), None)

    def refuse_gradient_hooks(self) -> None:
        """Raise ValueError if a parameter has a gradient hook of other code."""
        for p in self.parameters:
            others = len(p._post_accumulate_grad_hooks or ()) - 1  # besides that of the clipper
            if p._backward_hooks or (others > 0 and others > self.parallel.native_hooks(p)):
                raise ValueError(
                    f"trainable parameter '{self.name_of(p)}' has a gradient hook, which could change or use "
                    "gradients without noise. Remove it: call remove() of the handle that register_hook returned."
                )

    def are_the_same(self) -> bool:
        """Return True if the same parameters are trainable now."""
        return self._ids == _trainable_ids(self.model)

    def are_of_the_same_model(self) -> bool:
        """Return True if the parameters and the modules are the same, so that discovery need not run again."""
        return self.are_the_same() and self._modules == list(self.model.modules())

    def require_same(self) -> None:
        """Raise ValueError if other parameters are trainable now, or if one has another shape or precision."""
        self.shards.reshard()
        for p, dtype, shape in zip(self.parameters, self._dtypes, self._shapes, strict=True):
            if p.shape != shape:
                raise ValueError(
                    f"parameter '{self.name_of(p)}' has shape {tuple(p.shape)}, and had {tuple(shape)} when training "
                    "began (resize_token_embeddings?): the optimizer's state and the noise have the old shape. Change "
                    "it before make_private (or before the trainer is made)."
                )
            if p.dtype != dtype:
                raise ValueError(
                    f"parameter '{self.name_of(p)}' is {p.dtype}, and was {dtype} when training began: gradients are "
                    "summed and get their noise in the precision that was checked then. Change it before make_private "
                    "(or before train())."
                )
        if self.are_the_same():
            return
        names = {id(p): name for name, p in self.model.named_parameters()}
        now, before = set(_trainable_ids(self.model)), set(self._ids)
        frozen = sorted(names.get(i, "a parameter that was replaced") for i in before - now)
        added = sorted(names[i] for i in now - before)
        what = (
            f"'{frozen[0]}' was frozen or taken out"
            if frozen
            else f"'{added[0]}' became trainable"
            if added
            else "their order is another one"
        )
        raise ValueError(
            f"the set of trainable parameters changed since make_private (or since train() began): {what}. Freeze, "
            "unfreeze, replace and add layers and adapters before it, and build the optimizer afterwards."
        )


def _trainable_ids(model: nn.Module) -> list[int]:
    """Return the ids of the trainable parameters. It runs in every step, so it avoids the bookkeeping of names in
    ``model.parameters()``."""
    found: list[int] = []
    seen: set[int] = set()
    todo: list[nn.Module | None] = [model]
    while todo:
        module = todo.pop()
        if module is not None and id(module) not in seen:
            seen.add(id(module))
            found += [id(p) for p in module._parameters.values() if p is not None and p.requires_grad]
            todo += module._modules.values()
    return found
