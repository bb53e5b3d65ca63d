"""Tensor parallelism: weights that are split over a group of processes, all of which work on the same examples.

Handled are transformers' plans (``DistributedConfig(tp_size=...)``) and torch's ``parallelize_module``, alone or under
FSDP2. A split parameter's per-example gradient is split like the parameter: a rule gives a term of the whole or of
this process's part of it, width by width as the activation and the output gradient lie, and
:meth:`TensorParallel.local_part` cuts what is whole. So the squared norm of an example is the sum over the group of
what the processes hold, a parameter that all of them hold being counted by one: (B,) numbers are added over the group
once for each physical batch. Clipped sums are formed where the parameter lies and are not communicated.

Two kinds of parameters are held by all. Most see whole activations, and have the same gradient everywhere. Norms
between column- and row-wise layers (of queries and keys, by head) or on a split sequence see a part: their per-example
gradients are added over the group before they are measured, for the norm of a sum does not follow from norms.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_flatten

from ..terms import Dense, NormOnly, Outer, Rows, Term
from .dispatch import PLAIN, REPLICATED_WITH_GRAD_ALLREDUCE, STYLES, class_forward, closure_of, style_of
from .dtensor import is_dtensor, to_local
from .fsdp2 import Shards

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Shard

_HOW_TO_FIX = (
    "Take it out of the tensor-parallel plan, freeze it, or use FSDP2 (fully_shard) over all processes instead."
)


@dataclass(frozen=True)
class _LocalSlice:
    """This process's rows ``[start, start + shape[dim])`` of a parameter's dimension ``dim``."""

    dim: int
    start: int
    whole: int
    shape: torch.Size  # of what this process holds

    def cut(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        length = self.shape[self.dim]
        return x.narrow(dim, self.start, length) if x.shape[dim] == self.whole != length else x

    def of(self, term: Term) -> Term | None:
        """Return this process's part of ``term``; None if it is unknown."""
        if isinstance(term, Outer):
            left, right = (self.cut(x, 2) if i == self.dim else x for i, x in enumerate((term.left, term.right)))
            return Outer(left, right) if (left.shape[2], right.shape[2]) == self.shape else None
        if isinstance(term, Rows):
            ids, grad, num_rows = term.ids, term.grad, term.num_rows
            if self.dim == 1:
                grad = self.cut(grad, 2)
            else:  # rows of other processes get gradient 0, at any id
                ids, num_rows = ids - self.start, self.shape[0]
                elsewhere = (ids < 0) | (ids >= num_rows)
                ids, grad = ids.masked_fill(elsewhere, 0), grad.masked_fill(elsewhere.unsqueeze(-1), 0)
            return Rows(ids, grad, num_rows) if (num_rows, grad.shape[2]) == self.shape else None
        if isinstance(term, Dense):
            grad = self.cut(term.grad, 1 + self.dim)
            # of a bias: positions by features
            parts = tuple((self.cut(x, x.dim() - 1), dims) for x, dims in term.parts)
            return Dense(grad, parts) if grad.shape[1:] == self.shape else None
        return None


class TensorParallel:
    """The tensor parallelism of ``model``; empty (false) where there is none.

    Raises:
        ValueError: a layout whose norms or sums would not be exact.
    """

    def __init__(self, model: nn.Module, shards: Shards):
        self._shards = shards
        wholes = {name: (p, shards.unsharded(p)) for name, p in model.named_parameters()}
        split = {name: (p, cast("DTensor", whole)) for name, (p, whole) in wholes.items() if is_dtensor(whole)}
        self._refuse_modules(model, bool(split))
        meshes = {whole.device_mesh for _, whole in split.values()}
        if len(meshes) > 1 or any(mesh.ndim > 1 for mesh in meshes):
            raise ValueError(
                f"parameters are split over the device meshes {', '.join(sorted(map(str, meshes)))}, and tensor "
                "parallelism is exact here over one mesh of one dimension: give parallelize_module such a one."
            )
        self.mesh = next(iter(meshes), None)
        self.group = self.mesh.get_group() if self.mesh is not None else None
        self._slices = {
            p: _local_slice(name, whole)
            for name, (p, whole) in split.items()
            if p.requires_grad and whole.placements[0].is_shard()
        }
        for name, (p, whole) in split.items():
            if p.requires_grad and not (whole.placements[0].is_shard() or whole.placements[0].is_replicate()):
                raise ValueError(
                    f"parameter '{name}' has the placement {whole.placements[0]}, and only Shard and Replicate are "
                    f"known. {_HOW_TO_FIX}"
                )
        self._replicated_with_grad_allreduce = {
            p
            for m in model.modules()
            if style_of(m) == REPLICATED_WITH_GRAD_ALLREDUCE
            for p in m.parameters(recurse=False)
        }

    def __bool__(self) -> bool:
        return self.mesh is not None

    def _refuse_modules(self, model: nn.Module, has_split: bool) -> None:
        if not has_split and (getattr(model, "_tp_size", None) or 1) > 1:
            raise ValueError(
                f"{type(model).__name__} was loaded with tensor parallelism over {model._tp_size} processes, but no "
                "parameter says how it is split (none is a DTensor), so norms over the processes cannot be known. "
                "Load it with DistributedConfig(tp_size=...)."
            )
        for path, module in model.named_modules():
            style = style_of(module)
            if style is None and getattr(vars(module).get("forward"), "__module__", "").startswith(
                "transformers.distributed."
            ):
                style = vars(module)["forward"].__qualname__
            if style is None:
                continue
            layouts = [
                getattr(closure_of(module).get("self"), name, None) for name in ("input_layouts", "output_layouts")
            ]
            if style not in {*PLAIN, REPLICATED_WITH_GRAD_ALLREDUCE}:
                raise ValueError(
                    f"'{path}' ({type(module).__name__}) runs in the parallel style {style}, for which per-example "
                    f"norms are not known. {_HOW_TO_FIX}"
                )
            if any(x is not None and not x.is_replicate() and getattr(x, "dim", 0) != -1 for x in layouts):
                raise ValueError(
                    f"'{path}' ({type(module).__name__}) splits its activations as {layouts} (input and output), and "
                    f"only splits by features, Shard(-1), are known. {_HOW_TO_FIX}"
                )

    def refuse(self, owner: Any, *, is_rerun: bool) -> None:
        """Raise ValueError if a re-run module contains split parameters, or split parameters have a rule that does not
        support parts."""
        if not self:
            return
        module, splits = owner.module, any(p in self._slices for p in owner.names)
        below = any(is_dtensor(self._shards.unsharded(p)) for p in module.parameters()) or any(
            map(style_of, module.modules())
        )
        if splits and class_forward(module) not in (nn.Linear.forward, nn.Embedding.forward):
            raise ValueError(
                f"{owner} holds split parameters, and only the rules of nn.Linear and nn.Embedding give the "
                f"per-example gradients of the parts. {_HOW_TO_FIX}"
            )
        if is_rerun and below:
            raise ValueError(
                f"the gradients of {owner} are computed by running it again, or from inside of it, and that is not "
                "possible where it or a module in it is tensor-parallel. Move its own parameters into a module "
                f"beside the tensor-parallel ones, or freeze them. {_HOW_TO_FIX}"
            )

    # ---- activations ----

    def sums_positions(self, owner: Any, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> bool:
        """Return True if this rank has only some of the positions on which replicated parameters were used."""
        activations = [x for x in (*inputs, *outputs) if is_dtensor(x)]
        if not activations:
            return style_of(owner.module) == REPLICATED_WITH_GRAD_ALLREDUCE
        kinds = {_kind(x) for x in activations}
        partial = {"partial"} if not any(is_dtensor(x) and _kind(x) == "partial" for x in inputs) else set()
        allowed = (
            [{"whole", "features"} | partial]
            if any(p in self._slices for p in owner.names)
            else [{"whole"}, {"positions"}]
        )
        if any(x.device_mesh != self.mesh for x in activations) or not any(kinds <= these for these in allowed):
            layouts = [x.placements for x in activations]
            raise ValueError(
                f"{owner} works on activations with the placements {layouts}, of which it is not known what "
                f"per-example gradients they add up to. {_HOW_TO_FIX}"
            )
        return kinds == {"positions"}

    # ---- norms ----

    def local_part(self, owner: Any, parameter: nn.Parameter, term: Term, sums_positions: bool) -> Term:
        """Return this process's part of ``term``; all of it if all processes hold the parameter."""
        if isinstance(term, NormOnly) and (sums_positions or parameter in self._slices):
            raise ValueError(
                f"the function registered for {owner} with register_norm_sampler gives norms alone, and the gradients "
                f"of '{owner.names[parameter]}' are needed, which lie in parts on several processes: use "
                "clipping_mode='book_keeping', which asks for gradients, or register no norm sampler for this layer."
            )
        if sums_positions:
            grad = term.instantiate().grad.clone()
            dist.all_reduce(grad, group=self.group)
            return Dense(grad)
        if parameter not in self._slices:
            return term
        found = self._slices[parameter].of(term)
        if found is None:
            raise ValueError(
                f"the gradient of '{owner.names[parameter]}' in {owner} cannot be split as the parameter is, by its "
                f"dimension {self._slices[parameter].dim}. {_HOW_TO_FIX}"
            )
        return found

    def counts_norm_of(self, parameter: nn.Parameter) -> bool:
        """Return True if this rank counts the parameter's norm: each rank counts its own slices, and the first rank
        also the parameters that all ranks hold."""
        return self.mesh is None or parameter in self._slices or self.mesh.get_local_rank() == 0

    def sum_over_group(self, norm_sq_b: torch.Tensor) -> torch.Tensor:
        """(B,) summed over the group."""
        if self:
            norm_sq_b = norm_sq_b.clone()
            dist.all_reduce(norm_sq_b, group=self.group)
        return norm_sq_b

    # ---- sums ----

    def shape(self, parameter: nn.Parameter) -> torch.Size:
        """Local shape of the parameter."""
        return self._slices[parameter].shape if self._slices and parameter in self._slices else parameter.shape

    def native_hooks(self, parameter: nn.Parameter) -> int:
        """Returns how many of the parameter's gradient hooks are those of transformers' norms by head."""
        hooks = parameter._post_accumulate_grad_hooks or {}
        return sum(
            hook.__module__ == STYLES and hook.__qualname__.startswith(REPLICATED_WITH_GRAD_ALLREDUCE)
            for hook in hooks.values()
            if hasattr(hook, "__qualname__")
        )

    # ---- checks ----

    def native_gradient(self, parameter: nn.Parameter, grad: torch.Tensor) -> torch.Tensor:
        """Returns what autograd.grad gave for one example, over all positions and laid out like the parameter over the
        group."""
        whole = self._shards.unsharded(parameter)
        if is_dtensor(grad):
            return grad.redistribute(placements=cast("DTensor", whole).placements)
        if parameter in self._replicated_with_grad_allreduce:
            dist.all_reduce(grad := grad.clone(), group=self.group)
        return grad

    def require_same(self, inputs: Any, random_state: Any) -> None:
        """Raise ValueError unless all processes of the group have the same examples and random state (of dropout)."""
        if not self:
            return
        if len(set(self._gathered(_digest(inputs)))) > 1:
            raise ValueError(
                "the processes of one tensor-parallel group were given different examples, and would compute a "
                "mixture of them: give all processes of a group the same examples, and different ones to other groups."
            )
        if len(set(self._gathered(_digest(random_state)))) > 1:
            raise ValueError(
                "the processes of one tensor-parallel group are at different random numbers of torch, so dropout "
                "would not be the same where they hold the same activations: call torch.manual_seed on all of them "
                "with one number that nobody else knows (secrets.randbits(63) on one of them, sent to the others)."
            )

    def differing(
        self, parameters: Sequence[nn.Parameter], grads: Sequence[torch.Tensor], tolerance: float
    ) -> list[int]:
        """Return the indices of replicated parameters with gradients that differ between processes, so that parts of
        them are not summed."""
        held = [i for i, p in enumerate(parameters) if self and p not in self._slices]
        if not held:
            return []
        far, length = [], []
        for grad in (to_local(grads[i]).contiguous() for i in held):
            dist.broadcast(first := grad.clone(), group=self.group, group_src=0)
            far.append((grad - first).norm())
            length.append(first.norm())
        far, length = torch.stack(far), torch.stack(length)
        dist.all_reduce(far, op=dist.ReduceOp.MAX, group=self.group)
        is_far = far > tolerance * (length + 1e-3 * length.max())  # one that cancels is only rounding
        return [i for i, differs in zip(held, is_far.tolist(), strict=True) if differs]

    def _gathered(self, value: Any) -> list[Any]:
        box: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(box, value, group=self.group)
        return box


def _digest(structure: Any) -> bytes:
    digest = hashlib.sha256()
    for x in tree_flatten(structure)[0]:
        if isinstance(x, torch.Tensor):
            x = (tuple(x.shape), x.dtype, x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        digest.update(repr(x).encode())
    return digest.digest()


def _local_slice(name: str, whole: DTensor) -> _LocalSlice:
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    placement, held = whole.placements[0], whole.to_local().shape
    shape, offset = compute_local_shape_and_global_offset(whole.shape, whole.device_mesh, whole.placements)
    if type(placement) is not Shard or torch.Size(shape) != held:
        raise ValueError(
            f"parameter '{name}' has the placement {placement}, and this process holds a part of shape {tuple(held)}, "
            f"where only an even Shard is known. {_HOW_TO_FIX}"
        )
    dim, size = placement.dim % whole.dim(), whole.device_mesh.size()
    # by what is known to all, so that all of them stop
    if -(-whole.shape[dim] // size) * (size - 1) >= whole.shape[dim]:
        raise ValueError(
            f"parameter '{name}' {tuple(whole.shape)} leaves nothing to the last of {size} processes. {_HOW_TO_FIX}"
        )
    return _LocalSlice(dim, offset[dim], whole.shape[dim], held)


def _kind(activation: DTensor) -> str:
    """Return how the activation is split along the mesh."""
    placement = activation.placements[0]
    if placement.is_replicate():
        return "whole"
    if placement.is_partial():
        return "partial"
    dim = (
        cast("Shard", placement).dim % activation.dim()
        if placement.is_shard() and activation.is_floating_point()
        else 0
    )
    return "examples" if dim == 0 else "features" if dim == activation.dim() - 1 else "positions"
