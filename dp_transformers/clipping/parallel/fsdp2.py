"""FSDP2 (`fully_shard`): parameters that are sharded over ranks.

FSDP2 keeps two versions of a parameter: the *sharded* one, a DTensor, is trained; the *unsharded* one, an ordinary
tensor, is held by modules while they run, and is in autograd's graph. Both remain the same objects, so owners, terms
and sums refer to the sharded one, and :class:`Shards` translates for modules and autograd. A parameter tied over
several units, as in models that transformers shards while it loads them, has an unsharded version for each unit.

The clipped sum is formed in full, one parameter after the other, and reduce-scattered immediately (book-keeping); or
it is passed to FSDP2's own backward, which does so for a group of parameters at a time (the second pass of other
modes). Passes that only measure communicate no gradient."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeGuard, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map

from ..errors import how_to_fix, named
from .dtensor import as_dtensor_like

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

T = TypeVar("T")


class Shards:
    """The sharded parameters of ``model``; empty (false) if nothing is sharded.

    Raises:
        ValueError: clipped sums would not be exact: FSDP2 ignores trainable parameters, or reduces gradients over
            ranks
            in less than float32.
    """

    def __init__(self, model: nn.Module):
        self.modules = [m for m in model.modules() if _is_fsdp(m)]
        self._unsharded: dict[nn.Parameter, list[nn.Parameter]] = defaultdict(list)
        self._sharded: dict[nn.Parameter, nn.Parameter] = {}
        self.reshard()
        slots = [(m, name, p) for m in model.modules() for name, p in m._parameters.items() if p is not None]
        for module in self.modules:
            if module._get_fsdp_state()._fsdp_param_groups:
                module.unshard()
                for m, name, shard in slots:
                    whole = m._parameters[name]
                    if whole is not None and whole is not shard and whole not in self._sharded:
                        self._unsharded[shard].append(whole)
                        self._sharded[whole] = shard
                module.reshard()
        self._groups = [group for m in self.modules for group in m._get_fsdp_state()._fsdp_param_groups]
        self._takers: dict[nn.Parameter, list[tuple[FSDPParamGroup, FSDPParam]]] = defaultdict(list)
        for group in self._groups:
            for each in group.fsdp_params:
                if (p := self._sharded.get(each.unsharded_param)) is not None:
                    self._takers[p].append((group, each))
        self._refuse(model)

    def __bool__(self) -> bool:
        return bool(self.modules)

    def _refuse(self, model: nn.Module) -> None:
        for name, p in model.named_parameters():
            if self and p.requires_grad and p not in self._unsharded:
                raise ValueError(
                    f"parameter '{name}' is trainable and not sharded, although others of the model are: nothing sums "
                    "its gradient over processes. Apply fully_shard to the whole model too, without this parameter in "
                    "ignored_params, or freeze it."
                )
        config = getattr(model, "config", None)
        drops = [
            name
            for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
            if self and getattr(config, name, 0)
        ]
        if drops:
            raise ValueError(
                f"{drops[0]}={getattr(config, drops[0])}: each process would drop layers of its own, and wait for "
                "ever for the others to gather what they do not use. Set "
                f"{', '.join(f'model.config.{name}' for name in drops)} to 0 before the model is built."
            )
        trained = [group for group in self._groups if any(p.sharded_param.requires_grad for p in group.fsdp_params)]
        if len(meshes := {group.mesh_info.mesh for group in trained}) > 1:
            raise ValueError(
                f"trainable parameters are sharded over different device meshes, {' and '.join(map(str, meshes))}: "
                "apply fully_shard with one mesh= everywhere."
            )
        # of data parallelism; that of tensor parallelism lies in the whole parameters
        self.mesh = next(iter(meshes), None)
        for policy in (module._get_fsdp_state()._mp_policy for module in self.modules):
            exact = (None, torch.float32)
            if policy.reduce_dtype not in exact or (policy.reduce_dtype is None and policy.param_dtype not in exact):
                raise ValueError(
                    f"fully_shard would sum gradients over processes in {policy.reduce_dtype or policy.param_dtype}, "
                    "which can move the sum by more than max_grad_norm: use "
                    "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)."
                )

    def unsharded(self, p: nn.Parameter) -> nn.Parameter:
        """Return the tensor that modules hold for ``p`` while they run; ``p`` itself if it is not sharded."""
        return self.all_unsharded(p)[0] if self._unsharded else p

    def all_unsharded(self, p: nn.Parameter) -> list[nn.Parameter]:
        """Return these tensors for all units of ``fully_shard`` that gather ``p``."""
        return self._unsharded.get(p, [p]) if self._unsharded else [p]

    def sharded(self, unsharded: nn.Parameter) -> nn.Parameter:
        """Return the sharded parameter of ``unsharded``."""
        return self._sharded.get(unsharded, unsharded) if self._sharded else unsharded

    def refuse_rerun(self, path: str, module: nn.Module) -> None:
        """Raise ValueError if a module gathers parameters itself: it cannot be re-run inside backward with
        substitutes."""
        units = [f"'{name}'" if name else "it" for name, m in module.named_modules(prefix=path) if _is_fsdp(m)]
        if units:
            otherwise = (
                f"Apply fully_shard to a module that holds '{path}', and to nothing in it."
                if path
                else "Move its own parameters, and what is computed with them, into a module inside of it."
            )
            raise ValueError(
                f"{named(path, module)} has no rule for per-example gradients, so it would be called again inside "
                f"backward, where FSDP2 cannot gather its weights, since fully_shard was applied to {units[0]}. "
                f"{otherwise} {how_to_fix(module)}"
            )

    def reshard(self) -> None:
        """Reshard all units: FSDP2 leaves some unsharded after a forward pass without backward."""
        for module in self.modules:
            module.reshard()

    def recover(self) -> None:
        """Make FSDP2 ready for another forward pass after one that raised."""
        for module in self.modules:
            if module._get_fsdp_state()._is_root:
                module.reset_iter_state()

    # ---- sums over processes ----

    def summed(self, p: nn.Parameter, total: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of the sum of ``total`` over ranks, placed like ``p``; ``total`` itself if ``p`` is
        not sharded."""
        if p not in self._unsharded or self.mesh is None:
            return total
        from torch.distributed.tensor import DTensor, Partial, Placement, Shard

        mesh, placements = self.mesh, list[Placement]([Partial()]) * self.mesh.ndim
        grad = DTensor.from_local(total, mesh, placements, run_check=False)
        for dim in reversed(range(mesh.ndim)):  # first over the shards, so that replicas exchange no more than a shard
            lies = cast(DTensor, p).placements[dim]
            placements[dim] = (
                lies if lies.is_replicate() else Shard(cast(Shard, lies).dim)
            )  # strided where tensor parallelism splits it too
            grad = grad.redistribute(placements=placements)
        return as_dtensor_like(grad.to_local().to(p.device), p)

    def accept(self, p: nn.Parameter, total: torch.Tensor) -> bool:
        """Pass the whole sum ``total`` to the unit of ``p`` whose backward is running, which reduces it over ranks at
        its end. Return False if there is none. Call inside :meth:`taking_sums`."""
        from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

        for group, taker in self._takers[p]:
            if group._training_state is not TrainingState.PRE_BACKWARD:
                continue
            if taker.unsharded_param.dtype != total.dtype:  # a group has one dtype, and FSDP2 would fill up in that
                for other in group.fsdp_params:
                    if other.unsharded_accumulated_grad is None and other.unsharded_param.requires_grad:
                        zeros = torch.zeros_like(other.unsharded_param, dtype=total.dtype)
                        other.unsharded_accumulated_grad = zeros
            total = as_dtensor_like(total, taker.unsharded_param)
            before = taker.unsharded_accumulated_grad
            taker.unsharded_accumulated_grad = total if before is None else before.add_(total)
            return True
        return False

    @contextmanager
    def taking_sums(self) -> Iterator[None]:
        """Make FSDP2's own backward sum over processes what its units accepted, instead of averaging, inside the
        context."""
        names = ("gradient_divide_factor", "force_sum_reduction_for_comms", "reduce_grads", "all_reduce_grads")
        before = [[getattr(group, name) for name in names] for group in self._groups]
        self._drop_taken()  # nobody else's gradient goes with the sums
        for module in self.modules:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_requires_gradient_sync(True, recurse=False)
            module.set_reduce_scatter_unused_params(True, recurse=False)  # every process in every collective
        try:
            yield
        finally:
            for group, values in zip(self._groups, before, strict=True):
                for name, value in zip(names, values, strict=True):
                    setattr(group, name, value)
            self._drop_taken()  # of a pass that raised
            for module in self.modules:
                module.set_reduce_scatter_unused_params(False, recurse=False)

    def _drop_taken(self) -> None:
        for group in self._groups:
            for each in group.fsdp_params:
                each.unsharded_accumulated_grad = None

    def any_rank(self, condition: bool, device: torch.device) -> bool:
        """Return True if ``condition`` holds on any rank that shares the parameters."""
        if self.mesh is None:
            return condition
        flag = torch.tensor(float(condition), device=device)
        for dim in range(self.mesh.ndim):  # a tensor-parallel group agrees already, on norms
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.mesh.get_group(dim))
        return bool(flag)

    def least(self, number: int, device: torch.device) -> int:
        """Return the smallest number of all ranks that share the parameters."""
        if self.mesh is None:
            return number
        box = torch.tensor(number, device=device)
        for dim in range(self.mesh.ndim):
            dist.all_reduce(box, op=dist.ReduceOp.MIN, group=self.mesh.get_group(dim))
        return int(box)

    def broadcast_inputs(self, structure: T, device: torch.device) -> T:
        """Broadcast rank 0's ``structure`` of tensors."""
        if not self:
            return structure
        box = [tree_map(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x, structure)]
        dist.broadcast_object_list(box, src=0)
        return tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, box[0])


def reshard(model: nn.Module) -> None:
    """Put the shards in place everywhere in a model, as :meth:`Shards.reshard` does."""
    for module in model.modules():
        if _is_fsdp(module):
            module.reshard()


def _is_fsdp(module: nn.Module) -> TypeGuard[FSDPModule]:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # a module that is sharded has imported it
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)
