"""The check that what a model computes for a row of a real batch does not depend on what is in the other rows."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ...mechanism.values import equal_or_nan
from ...runtime.randomness import global_state, same_global_state, seeded_global_generators
from ..engine import ClippingEngine
from ..errors import SelfCheckError
from ..parallel.dtensor import is_dtensor
from ..ragged import Ragged, is_ragged, packed, unpacked
from ..recorded_call import ForwardPass, ModelCall
from .redrawn_numbers import drawn_for_rows, refuse_numbers_of_some_rows
from .reference import TOLERANCE
from .shared_numbers import Drawn, watched_draws
from .spread_numbers import spread_numbers
from .synthetic import evaluating, examples_first, floating_tensors, kept_buffers, with_rows

logger = logging.getLogger(__name__)

_SAMPLE = 2**14  # numbers of a row of an output that are compared
_LEAST = 1e-2  # rows whose numbers are smaller than this share of the largest row's are measured by that share
_SORTS = (torch.ops.aten.topk, torch.ops.aten.sort, torch.ops.aten.argsort)


def looks_at_calls(engine: ClippingEngine, forward: ForwardPass, number: int) -> list[Look]:
    """Looks at what the model was called with in ``forward``, for a real batch, as far as that was kept. ``number``
    seeds their random numbers."""
    calls, forward.calls = forward.calls, []
    return [Look(engine, forward, call, number) for call in calls if forward.batch_size > 1]


def require_same_beside_others(engine: ClippingEngine, looks: Sequence[Look], losses: torch.Tensor | None) -> None:
    """Run the model again on what it was called with, as it was, and with every second row in the place of its
    neighbour, for either half. What it returns for the rows that stayed must be the same.

    The self-check sees made-up batches, and gradients do not tell of a condition over the batch (whether any row holds
    a token of some kind). Nothing is recorded, random numbers are the same each time, and buffers are put back. Which
    output is used is asked of the losses where it may hold a number for each pair of rows.

    Args:
        losses: (B,) with graph; None where they are not known.

    Raises:
        SelfCheckError: what the model returns for a row is another one beside other rows.
    """
    for look in looks:
        try:
            moved = look.finds() and look.finds_again(losses)
        except Exception as error:  # lengths that must be sorted, objects that are used up, no memory left
            logger.info("the model was not looked at beside other rows: %s: %s", type(error).__name__, error)
            continue
        if moved:
            engine.trainable.drop_gradients()
            engine.forget()
            raise SelfCheckError(
                f"{look.where} returns something else for a row of this batch when other rows stand beside it: what "
                "is in one example decides what is computed for others (a condition over the whole batch, as "
                "(input_ids == image_token).any(), a maximum, statistics, places that are limited), beyond the "
                "clipping bound. Compute each row from itself alone: apply what some rows need to all of them and "
                "choose by a mask, row by row (torch.where). ModuleValidator.find_mixing(model, batch), on public "
                "examples, names a module that mixes."
            )


def draw_for_all_rows(engine: ClippingEngine, looks: Sequence[Look]) -> list[str]:
    """Return which modules, or generators, draw random numbers that all rows share (:mod:`.shared_numbers`), where the
    model is run again on what it was called with.

    Raises:
        SelfCheckError: some rows share numbers, and others do not.
    """
    found: list[str] = []
    for look in looks:
        try:
            found += look.draw_for_all_rows()
        except Exception as error:  # as of the looks above
            logger.info("it was not looked at which numbers rows share: %s: %s", type(error).__name__, error)
        if look.shares_some:
            engine.trainable.drop_gradients()
            engine.forget()
            refuse_numbers_of_some_rows(look.where)
    return found


class Look:
    """One call of the model, run again on chosen rows."""

    def __init__(self, engine: ClippingEngine, forward: ForwardPass, call: ModelCall, number: int):
        self._engine, self._call, self._size, self._number = engine, call, forward.batch_size, number
        lowest = min(forward.low_precision, engine.trainable.low_precision, key=lambda dtype: torch.finfo(dtype).bits)
        self._tolerance = TOLERANCE[lowest]
        self._evaluates = not engine.model.training
        self._own: list[torch.Tensor] | None = None  # once the model ran on the rows as they were
        self.where = type(engine.model).__name__
        self.shares_some = False  # whether some rows are found to share random numbers, and others not

    def _halves(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Which rows stay, and which row is in each place. Neighbours are, so that what is sorted stays sorted."""
        i = torch.arange(self._size)
        odd = (i + (i + 1) % 2).where(i + (i + 1) % 2 < self._size, i - 1)
        return [(i[::2], i - i % 2), (i[1::2], odd)]

    def draw_for_all_rows(self) -> list[str]:
        """The modules, and the generators, that draw random numbers for all rows together, in training mode."""
        if self._evaluates:
            return []

        def draw(rows: slice, seed: int) -> Drawn:
            args, kwargs = self._with_rows(torch.arange(self._size)[rows], spares_squares=False)
            with torch.no_grad(), self._as_it_was(seed), watched_draws() as drawn:
                before = global_state(device)
                self._engine.state.restore()
                output = self._engine.model(*args, **kwargs)
                found, drew_none = drawn(), same_global_state(before, global_state(device))
            if rows == slice(self._size) and drew_none and not found.by_torch:
                self._own = self._sampled(output)  # as any other run would find it
            return found

        device, known = self._engine.trainable.device, self._engine.dropouts_for_all_rows
        names = {module: name or "the model itself" for name, module in self._engine.model.named_modules()}
        found, self.shares_some = drawn_for_rows(draw, self._as_trained, self._moved_rows, self._size, known)
        return [x if isinstance(x, str) else names.get(x, "the model") for x in found]

    @torch.no_grad()
    def _as_trained(self) -> list[torch.Tensor]:
        """The outputs with the random numbers of training."""
        args, kwargs = self._with_rows(torch.arange(self._size), spares_squares=False)
        with self._as_it_was():
            self._engine.state.restore()
            return self._sampled(self._engine.model(*args, **kwargs))

    def _moved_rows(self, own: list[torch.Tensor], others: list[torch.Tensor]) -> torch.Tensor:
        """(B,) bool, for which rows some output is another one."""
        changes = self._changes(others, torch.arange(self._size), own=own)
        return torch.stack([torch.zeros(self._size, dtype=torch.bool), *(each.cpu() for each in changes)]).any(0)

    def finds(self) -> bool:
        """Whether some row that stays is moved by what is beside it."""
        try:
            return self._moves()
        except Exception:  # where operations are replaced; in evaluation none are
            if self._evaluates:
                raise
            self._evaluates, self._own = True, None
            return self._moves()

    def _moves(self) -> bool:
        self._own = self._run() if self._own is None else self._own
        evaluates, moved = self._evaluates, any(bool(moved_b.any()) for moved_b in self._moved())
        if self._evaluates == evaluates:
            return moved
        self._own = None  # of training, while the runs beside others were in evaluation
        return self._moves()

    def finds_again(self, losses: torch.Tensor | None) -> bool:
        """Whether that is the model's doing: it repeats itself where nothing is replaced, in a table of numbers for
        all pairs of rows what is used is moved, and so is a row if what may be no rows of the batch is left alone.

        Where positions are sorted (experts that each take some), rounding may send one of them another way, and
        changes its row. Of such a model most rows must be moved.
        """
        with _Sorting() as seen:
            again = self._run()
        if any(bool(moved_b.any()) for moved_b in self._changes(again, torch.arange(self._size))):
            return False
        used = self._used(losses)
        for spares_squares in (False, True) if self._has_squares() else (False,):
            moved = self._moved(used, spares_squares=spares_squares)
            if not any(_most(moved_b) if seen.sorts else bool(moved_b.any()) for moved_b in moved):
                return False
        return True

    def _moved(
        self, used: Sequence[torch.Tensor | None] | None = None, *, spares_squares: bool = False
    ) -> list[torch.Tensor]:
        """For both halves, and each output, which of the rows that stay are moved."""
        return [
            moved_b
            for kept, rows in self._halves()
            for moved_b in self._changes(self._run(rows, spares_squares=spares_squares), kept, used)
        ]

    def _changes(
        self,
        found: list[torch.Tensor],
        kept: torch.Tensor,
        used: Sequence[torch.Tensor | None] | None = None,
        own: list[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        changes, before = [], (self._own or []) if own is None else own
        for given, other, mask in zip(before, found, used or [None] * len(found), strict=True):
            if given.shape != other.shape:  # as long as the longest row
                continue
            kept = kept.to(given.device)
            own_b, other_b = given[kept], other[kept]
            differs = ~equal_or_nan(own_b, other_b)
            differs = differs if mask is None else differs & mask[kept]
            change_b = torch.where(differs, other_b - own_b, 0.0).norm(dim=1)
            length_b = given.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).norm(dim=1)
            scale_b = length_b[kept].clamp(min=_LEAST * float(length_b.max())).clamp(min=1e-12)
            changes.append(~(change_b <= self._tolerance * scale_b))
        return changes

    # ---- running the model ----

    @torch.no_grad()
    def _run(self, rows: torch.Tensor | None = None, *, spares_squares: bool = False) -> list[torch.Tensor]:
        """(B, numbers) some numbers of each output, from all over it."""
        engine = self._engine
        args, kwargs = self._with_rows(torch.arange(self._size) if rows is None else rows, spares_squares)
        with self._as_it_was(), ExitStack() as stack:
            if self._evaluates:
                stack.enter_context(evaluating(engine.model))
                engine.state.restore()
                return self._sampled(engine.model(*args, **kwargs))
            draws_no_others = stack.enter_context(spread_numbers({self._size}, reordered=True))
            engine.state.restore()
            found = self._sampled(engine.model(*args, **kwargs))
            if draws_no_others():
                return found
        self._evaluates = True
        return self._run(rows, spares_squares=spares_squares)

    @contextmanager
    def _as_it_was(self, seed: int = 0) -> Iterator[None]:
        """Inside, the model runs as in the call, with the same random numbers each time, and leaves nothing behind."""
        engine, (kind, dtype, is_enabled) = self._engine, self._call.autocast
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # of checkpointing without gradients
            stack.enter_context(engine.suspended())
            stack.enter_context(kept_buffers(engine.model))
            stack.enter_context(seeded_global_generators([self._number, seed], engine.trainable.device))
            stack.enter_context(torch.autocast(kind, dtype, is_enabled, cache_enabled=False))
            yield

    def _with_rows(self, rows: torch.Tensor, spares_squares: bool) -> tuple[tuple, dict]:
        """What the model is called with; lengths stay where rows lie in one tensor without padding."""

        def taken(x: Any) -> Any:
            if isinstance(x, Ragged):
                return replace(x, padded=x.padded[rows.to(x.padded.device)])
            if not isinstance(x, torch.Tensor):
                return x
            if not self._has_rows(x) or (spares_squares and _is_square(x)):
                return x.detach().clone()
            return x.detach().index_select(self._dim(x), rows.to(x.device))

        args, kwargs = unpacked(self._engine.model, self._call.args, self._call.kwargs)
        return packed(tree_map(taken, (args, kwargs), is_leaf=is_ragged))

    def _dim(self, x: torch.Tensor) -> int:
        return 0 if self._engine.batch_first or x.dim() == 1 else 1

    def _has_rows(self, x: torch.Tensor) -> bool:
        return x.dim() > self._dim(x) and x.shape[self._dim(x)] == self._size

    def _has_squares(self) -> bool:
        given = [x for x in tree_leaves((self._call.args, self._call.kwargs)) if isinstance(x, torch.Tensor)]
        return any(self._has_rows(x) and _is_square(x) for x in given)

    def _outputs(self, output: Any) -> list[torch.Tensor]:
        """The outputs that have a dimension for the rows, which comes first."""
        tensors = [x for x in floating_tensors(with_rows(output)) if x.dim() and not is_dtensor(x)]
        found = [examples_first(x, self._size, batch_first=self._engine.batch_first) for x in tensors]
        return [x for x in found if len(x) == self._size and x.numel()]

    def _sampled(self, output: Any) -> list[torch.Tensor]:
        return [_sample(x) for x in self._outputs(output)]

    def _used(self, losses: torch.Tensor | None) -> list[torch.Tensor | None]:
        """Of each output which numbers the losses come from, where these may be numbers for all pairs of rows."""
        outputs = self._outputs(self._call.output)
        squares = [x for x in outputs if x.requires_grad and _is_square(x)]
        if losses is None or not squares:
            return [None] * len(outputs)
        found = torch.autograd.grad(losses.sum(), squares, retain_graph=True, allow_unused=True)
        gradients = {id(x): torch.zeros_like(x) if g is None else g for x, g in zip(squares, found, strict=True)}
        return [_sample(gradients[id(x)]) != 0 if id(x) in gradients else None for x in outputs]


class _Sorting(TorchDispatchMode):
    """Notes whether the model sorts something."""

    sorts = False
    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        self.sorts |= getattr(func, "overloadpacket", None) in _SORTS
        return func(*args, **(kwargs or {}))


def _sample(x: torch.Tensor) -> torch.Tensor:
    flat = x.detach().flatten(1) if x.dim() > 1 else x.detach()[:, None]
    return flat[:, :: max(1, flat.shape[1] // _SAMPLE) | 1].float().clone()


def _is_square(x: torch.Tensor) -> bool:
    return x.dim() > 1 and x.shape[0] == x.shape[1]


def _most(moved_b: torch.Tensor) -> bool:
    return 2 * int(moved_b.sum()) > len(moved_b)
