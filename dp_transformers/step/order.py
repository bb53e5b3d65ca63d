"""Refuses every other order of draws, physical batches and passes than the one that ε is computed for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from ..data.draws import LogicalBatch, PhysicalBatch
from ..mechanism.mechanism import Mechanism

_AFTER_AN_ERROR = (
    "If an error or Ctrl-C stopped the loop, call engine.drop_draw(), which counts the draw as a step, and take the "
    "next batch."
)


class Stage(Enum):
    """The progress of a loop with a physical batch: its sum is formed once, and its step taken once."""

    HANDED_OUT, SUMMING, SUMMED, DONE = auto(), auto(), auto(), auto()


@dataclass(eq=False)
class BatchInHand:
    """A physical batch in the hands of the loop.

    Attributes:
        draw: The number of the draw that the batch is a part of.
        last_of_draw: True for the last physical batch of that draw.
        refusal: The reason why no sum may be formed of it; None if one may.
        stage: The progress of the loop with it.
    """

    batch: PhysicalBatch
    draw: int
    last_of_draw: bool
    refusal: str | None = None
    stage: Stage = Stage.HANDED_OUT


class DrawOrder:
    """Follows the draws of one training: each comes after the one before, and is worked on in full, once.

    Attributes:
        in_hand: The physical batch in the hands of the loop; None if there is none.
        step: The step of the last draw, counted from 0; -1 before the first draw.
        last: The number of the last draw.
    """

    def __init__(self) -> None:
        self.in_hand: BatchInHand | None = None
        self.step = self.last = -1
        self._dropped = -1  # the number of the last draw that was dropped
        self._released: int | None = None  # the number of the last draw that was released, or before the first one

    @property
    def current(self) -> BatchInHand | None:
        """The physical batch that is worked on; None between the batches."""
        return None if self.in_hand is None or self.in_hand.stage is Stage.DONE else self.in_hand

    @property
    def is_unfinished(self) -> bool:
        """True if the loop got a draw, and has not taken its step."""
        return self.in_hand is not None and not (self.in_hand.stage is Stage.DONE and self.in_hand.last_of_draw)

    def drop(self) -> bool:
        """End the draw that is worked on. Return True if there was one."""
        unfinished, self.in_hand, self._dropped = self.is_unfinished, None, self.last
        return unfinished

    def is_dropped(self, draw: LogicalBatch) -> bool:
        """Return True if no more batches of this draw may be handed out."""
        return draw.number <= self._dropped

    def begin(self, draw: Any) -> None:
        """Go on to the next draw.

        Raises:
            ValueError: it is no draw.
            RuntimeError: it is not the next.
        """
        if not isinstance(draw, LogicalBatch):
            raise ValueError(
                f"the train dataloader gave a {type(draw).__name__}, and not the draws that epsilon is computed for. "
                "Leave get_train_dataloader as it is, and pass train_dataset and data_collator."
            )
        before, self.last = self.last, max(draw.number, self.last)
        if before < 0:
            self._released = draw.number - 1
        elif draw.number <= before:
            raise RuntimeError(
                "the train dataloader repeated a draw, so examples are not drawn as epsilon assumes: do not cache or "
                "repeat its batches."
            )
        elif draw.number != before + 1 and not draw.starts_pass:
            raise RuntimeError(
                "the train dataloader left out a draw, so examples are not drawn as epsilon assumes: do not skip or "
                "reorder its batches."
            )
        self.step = draw.step

    def hand_out(self, batch: PhysicalBatch, draw: LogicalBatch, *, is_last: bool) -> BatchInHand:
        """Put the next physical batch of a draw into the hands of the loop. No sum may be formed of it if the loop did
        not finish the one before."""
        self.in_hand = BatchInHand(batch, draw.number, is_last, self._left_undone(draw.number))
        return self.in_hand

    def _left_undone(self, draw: int) -> str | None:
        before = self.in_hand
        if before is None or (before.draw == draw and before.stage in (Stage.SUMMED, Stage.DONE)):
            return None
        if before.stage is Stage.DONE and before.last_of_draw:
            return None
        if before.stage is Stage.SUMMED:
            return (
                "loss.backward() ran on a new draw before optimizer.step() was called for the one before. Call it "
                "after every backward, since every draw is one step; for larger batches raise the DataLoader's "
                "batch_size and set max_physical_batch_size."
            )
        return (
            "the loader was asked for another batch before loss.backward() ran on the one before. Run backward and "
            "optimizer.step() on every batch before you take the next, and before break. Do not peek with "
            "next(iter(loader)), and do not prefetch batches yourself (num_workers of the DataLoader loads ahead "
            f"safely). {_AFTER_AN_ERROR}"
        )

    def begin_sum(self, batch_size: int) -> BatchInHand:
        """Return the batch in hand, of which a sum is now formed. The model was called with ``batch_size`` rows.

        Raises:
            ValueError: no sum may be formed of it.
        """
        if (given := self.in_hand) is None:
            raise ValueError(
                "loss.backward() ran on data that did not come from the loader that make_private returned, or on a "
                "draw that was dropped (engine.drop_draw()). Call the model on the batches of that loader."
            )
        if given.refusal is not None:
            raise ValueError(given.refusal)
        if given.stage is Stage.SUMMING:
            raise ValueError(
                "an earlier backward pass on this batch was interrupted, and may have added a part of its sum. "
                + _AFTER_AN_ERROR
            )
        if given.stage is not Stage.HANDED_OUT:
            raise ValueError(
                "backward ran a second time on one batch of the loader, or on other data after it. Add the losses of "
                "a batch up first. For a loss that is not the private one (a generator's, an adversarial input's) go "
                "forward and backward inside 'with engine.suspended():', and for a step on public data inside 'with "
                "engine.public():'."
            )
        if batch_size != given.batch.size:
            raise ValueError(
                f"the model was called with {batch_size} rows, but the loader's batch has {given.batch.size} "
                "examples, so the norm of a row is not the norm of an example. Call the model once with the whole "
                "batch of the loader: do not repeat, join, flatten or split rows. If the batch is the second "
                "dimension of the model's inputs, call make_private with batch_first=False."
            )
        return given

    def require_finished(self, mechanism: Mechanism) -> None:
        """Raise ValueError if the last draw may not be released: a batch of it had no backward pass, or draws before
        it were left out and the ε of ``mechanism`` is for consecutive draws."""
        given, before = self.in_hand, self._released
        if mechanism.needs_every_draw and before is not None and self.last != before + 1:
            raise ValueError(
                f"draws {before + 1} to {self.last - 1} were left out (engine.drop_draw(), or a loop that left the "
                f"loader early), but with sampling {mechanism.sampling.kind!r} and noise {mechanism.noise.kind!r} "
                "epsilon is that of draws that follow each other. Load a checkpoint into a new engine, start another "
                "training from the original model, or take PoissonSampling and IndependentNoise without a schedule."
            )
        is_summed = given is None or (given.stage is Stage.SUMMED and given.last_of_draw)
        if given is not None and given.draw == self.last and not is_summed:
            raise ValueError(
                "the draw is not finished: a physical batch of it had no backward pass, so its sum may not be stepped "
                f"with. Run forward and backward once on every physical batch before the step. {_AFTER_AN_ERROR}"
            )

    def require_summed(self) -> BatchInHand:
        """Return the batch in hand.

        Raises:
            ValueError: its sum was not formed.
        """
        if (given := self.in_hand) is None or given.stage is not Stage.SUMMED:
            raise ValueError(
                "optimizer.step() was called without a loss.backward() on a batch of the private loader since the "
                f"last step. Call one backward, one step for every batch of the loader. {_AFTER_AN_ERROR}"
            )
        return given

    def end_release(self) -> None:
        """Record that the last draw was released."""
        self._released = self.last
        if self.in_hand is not None:
            self.in_hand.stage = Stage.DONE
