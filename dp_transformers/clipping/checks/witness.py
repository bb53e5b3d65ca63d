"""The witness: in random batches of the whole training one row runs again alone and unpadded, with the same result.

It catches mixing that begins long after the oracle compared rows (:mod:`.oracle`), as when a rare row or a long one
switches something on for others. A secret chooses the row, which runs forward only. If the batch drew random numbers,
the batch runs again too, and both runs have no dropout. Other rows must confirm a difference, since rounding may move
one row of a model that sorts positions (experts that take some of them).

A batch is chosen with probability p = 1% × (time of a batch) / (time of a look), so that looks take 1% of the time.
Mixing in n batches, if it moves the chosen rows, stays unseen with probability (1 - p)ⁿ.
"""

from __future__ import annotations

import logging
import random
import secrets
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from ...runtime.randomness import global_state, same_global_state, seeded_global_generators
from ..engine import ClippingEngine
from ..errors import SelfCheckError
from ..hooks import configurations, without_caches
from ..precision import HALF
from ..recorded_call import autocast_state
from .comparison import HOW_TO_FIND, TOLERANCE, coarsest, differs
from .rows import LossFunction, Rows, by_example, outputs_of
from .without_dropout import evaluating, without_dropout

logger = logging.getLogger(__name__)

SHARE = 0.01  # of the time
_MOST = 8  # rows that are looked at after one that differs
_RATE_OF_RANKS = 1 / 128  # where processes must look together: in so many batches


class Schedule:
    """Says when the witness looks, so that it takes no more than its share of the time.

    Args:
        clock: Returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._began = self._spent = self._last = 0.0
        self._secret, self._alike = random.Random(secrets.randbits(128)), random.Random(6)

    def is_due(self, *, together: bool) -> bool:
        """Count a batch, and return whether it is looked at. Where processes must look ``together``, all of them look
        at the same ones."""
        if together:
            return self._alike.random() < _RATE_OF_RANKS
        now = self._clock()
        self._began = self._began or now
        credit = SHARE * (now - self._began) - self._spent
        return credit >= 2 * self._last * self._secret.random()

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Inside, a look takes its time."""
        before = self._clock()
        try:
            yield
        finally:
            self._last = self._clock() - before
            self._spent += self._last


class Witness:
    """One batch of which a row is looked at.

    Args:
        engine: Of the model.
        rows: What the model, or the loss, is called with.
        losses_of: The losses that are compared; None for the model's outputs.
        secret: Chooses the row.
    """

    def __init__(self, engine: ClippingEngine, rows: Rows, losses_of: LossFunction | None, secret: int):
        self._engine, self._rows, self.losses_of = engine, rows, losses_of
        most = 1 if engine.trainable.shards else _MOST  # ranks may have fewer rows
        self._order = [(secret + i) % rows.size for i in range(min(rows.size, most))]
        self._autocast = autocast_state(engine.trainable.device)
        self.begin()

    def begin(self) -> None:
        """The generators are as the pass will find them."""
        self._before = global_state(self._engine.trainable.device)

    def look(self, given: Any) -> None:
        """Compare what the chosen row gives alone with what it gave in the batch.

        Raises:
            SelfCheckError: rows give something else alone.
        """
        engine, rows = self._engine, self._rows
        if rows.are_ambiguous:
            return
        drew = not same_global_state(self._before, global_state(engine.trainable.device))
        try:
            if self.losses_of is None:
                given = by_example(engine, given, rows)
            tensors = [*given] if self.losses_of is None else [given]
            self._low_precision = coarsest(engine, tensors)
            tensors = [x.detach() for x in tensors]
            if not (self._any_rank(drew) or self._are_moved(tensors)) or not self._are_moved_without_dropout():
                return
        except (SelfCheckError, torch.OutOfMemoryError) as error:  # outputs without rows, or no memory left
            logger.info("no row was run again alone: %s", error)
            return
        engine.trainable.drop_gradients()
        engine.forget()
        raise SelfCheckError(
            f"{type(engine.model).__name__} or its loss gives something else for a row of this batch when it is "
            "alone and unpadded: what is in other rows decides what is computed for it (a condition over the batch, "
            "as (input_ids == image_token).any(), a maximum, limited places, a length above which rows are treated "
            f"otherwise, a loss that compares rows), beyond the clipping bound. {HOW_TO_FIND}: compute each row from "
            "itself alone, apply what some rows need to all of them, and choose by a mask (torch.where)."
        )

    def _are_moved(self, given: Sequence[torch.Tensor], rows: int = 1, least: int = 1) -> bool:
        """Return True if, of so many rows, at least so many give something else alone."""
        moved = 0
        for row in self._order[:rows]:
            for x, (own, *_) in zip(given, self._computed(self._rows.alone(row))[0], strict=True):
                if differs(self._rows.own_part(x, row, own.shape), own, x, TOLERANCE[self._low_precision]):
                    moved += 1
                    break
        return self._any_rank(moved >= least)

    def _any_rank(self, condition: bool) -> bool:
        """Let all processes that share parameters run the model equally often."""
        trainable = self._engine.trainable
        return trainable.shards.any_rank(condition, trainable.device)

    def _are_moved_without_dropout(self) -> bool:
        """Return the same of more rows, where the batch runs again with constants for random numbers; False if some
        are drawn even where the model evaluates."""
        count, is_low = len(self._order), self._low_precision in HALF
        least = count // 2 + 1 if is_low else min(2, max(1, count - 1))
        for context in (nullcontext(), evaluating(self._engine.model)):
            with context:
                given, drew = self._computed(self._rows)
                if not self._any_rank(drew):
                    return self._are_moved(given) and self._are_moved(given, count, least)
        return False

    def _computed(self, rows: Rows) -> tuple[list[torch.Tensor], bool]:
        """Compute what is compared without a graph and without dropout, and leave nothing behind. Return it, and
        whether random numbers were drawn."""
        engine, device = self._engine, self._engine.trainable.device
        with (
            warnings.catch_warnings(),
            torch.no_grad(),
            engine.suspended(),
            engine.state.during_check(),
            without_caches(configurations(engine.model)),
            seeded_global_generators([0], device),
            without_dropout(),
            torch.autocast(*self._autocast, cache_enabled=False),
        ):
            warnings.simplefilter("ignore")  # of checkpointing without gradients
            before = global_state(device)
            return outputs_of(engine, rows, self.losses_of), not same_global_state(before, global_state(device))
