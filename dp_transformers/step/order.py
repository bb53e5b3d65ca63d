"""The order of draws, physical batches and passes that ε is computed for, and what is refused of any other."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from ..data.draws import LogicalBatch, PhysicalBatch
from ..mechanism.mechanism import Mechanism


class Stage(Enum):
    """How far a loop has come with a physical batch: its sum is formed once, and its step taken once."""

    HANDED_OUT, SUMMING, SUMMED, DONE = auto(), auto(), auto(), auto()


@dataclass(eq=False)
class BatchInHand:
    """A physical batch in the hands of the loop.

    Attributes:
        draw: The number of the draw that the batch is a part of.
        last_of_draw: Whether it is the last physical batch of that draw.
        refusal: Why no sum may be formed of it; None if one may.
        stage: How far the loop has come with it.
    """

    batch: PhysicalBatch
    draw: int
    last_of_draw: bool
    refusal: str | None = None
    stage: Stage = Stage.HANDED_OUT


class DrawOrder:
    """Follows the draws of one training: each comes after the one before, and is worked on in full, once.

    Attributes:
        in_hand: The physical batch in the hands of the loop; None where there is none.
        step: The step that the last draw is for, counted from 0; -1 before the first draw.
        last: The number of the last draw that came.
    """

    def __init__(self) -> None:
        self.in_hand: BatchInHand | None = None
        self.step = self.last = -1
        self._dropped = -1  # the number of the last draw that was dropped
        self._released: int | None = None  # that of the last draw that was released, or of the one before the first

    @property
    def current(self) -> BatchInHand | None:
        """The physical batch that is worked on; None between the batches."""
        return None if self.in_hand is None or self.in_hand.stage is Stage.DONE else self.in_hand

    @property
    def is_unfinished(self) -> bool:
        """Whether the loop was given a draw that no step was taken for."""
        return self.in_hand is not None and not (self.in_hand.stage is Stage.DONE and self.in_hand.last_of_draw)

    def drop(self) -> bool:
        """End the draw that is worked on, and return whether there was one."""
        unfinished, self.in_hand, self._dropped = self.is_unfinished, None, self.last
        return unfinished

    def is_dropped(self, draw: LogicalBatch) -> bool:
        """Return whether no more batches of this draw are to be handed out."""
        return draw.number <= self._dropped

    def begin(self, draw: Any) -> None:
        """Go on to the next draw.

        Raises:
            ValueError: it is no draw.
            RuntimeError: it is not the next.
        """
        if not isinstance(draw, LogicalBatch):
            raise ValueError(
                f"the train dataloader gave a {type(draw).__name__}, and not the draws that epsilon is computed "
                "for: it was replaced. Leave get_train_dataloader as it is; pass train_dataset and "
                "data_collator."
            )
        before, self.last = self.last, max(draw.number, self.last)
        if before < 0:
            self._released = draw.number - 1
        elif draw.number <= before:
            raise RuntimeError(
                "a draw was replayed by the train dataloader, so the examples are not drawn as epsilon assumes: do "
                "not cache or repeat its batches."
            )
        elif draw.number != before + 1 and not draw.starts_pass:
            raise RuntimeError(
                "a draw was left out by the train dataloader, so the examples are not drawn as epsilon assumes: do "
                "not skip or reorder its batches."
            )
        self.step = draw.step

    def hand_out(self, batch: PhysicalBatch, draw: LogicalBatch, *, is_last: bool) -> BatchInHand:
        """Put the next physical batch of a draw into the hands of the loop. Where it left the one before undone, no
        sum may be formed of it."""
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
                "loss.backward() ran on a new draw before optimizer.step() was called for the one before. Every draw "
                "is one step: call optimizer.step() after every backward. For larger batches raise the DataLoader's "
                "batch_size and set max_physical_batch_size."
            )
        return (
            "the loader was asked for another batch before loss.backward() ran on the one before. Run backward and "
            "optimizer.step() on every batch before you take the next, and before break: which examples take part in "
            "a step must not depend on data. Do not peek with next(iter(loader)), and do not prefetch batches "
            "yourself (num_workers of the DataLoader loads ahead safely). If an error or Ctrl-C stopped the loop, "
            "call engine.drop_draw(), which counts the draw as a step, and take the next batch."
        )

    def begin_sum(self, batch_size: int) -> BatchInHand:
        """Return the batch in hand, of which a sum is now formed, with ``batch_size`` rows in the model.

        Raises:
            ValueError: no sum may be formed of it.
        """
        if (given := self.in_hand) is None:
            raise ValueError(
                "loss.backward() ran on data that did not come from the loader that make_private returned, or on a "
                "draw that was dropped since (engine.drop_draw()): iterate over that loader, and call the model on "
                "its batches."
            )
        if given.refusal is not None:
            raise ValueError(given.refusal)
        if given.stage is Stage.SUMMING:
            raise ValueError(
                "an earlier backward pass on this batch was interrupted, and may have added a part of its sum. Call "
                "engine.drop_draw(), which counts the draw as a step, and take the next batch."
            )
        if given.stage is not Stage.HANDED_OUT:
            raise ValueError(
                "backward ran a second time on one batch of the loader, or on other data after it: an example's "
                "gradient would be added twice, or one that was not drawn. Add the losses of a batch up first. For a "
                "loss that is not the private one (a generator's, an adversarial input's) go forward and backward "
                "inside 'with engine.suspended():'."
            )
        if batch_size != given.batch.size:
            raise ValueError(
                f"the model was called with {batch_size} rows, but the loader's batch has {given.batch.size} "
                "examples, so the norm of a row is not the norm of an example. Call the model once with the whole "
                "batch that the loader gave, one row for each example: do not repeat, join, flatten or split rows, "
                "and take no data from another loader. If the batch is the second dimension of what the model is "
                "given, call make_private with batch_first=False."
            )
        return given

    def require_finished(self, mechanism: Mechanism) -> None:
        """Raise ValueError if the last draw may not be released: a batch of it had no backward pass, or draws before
        it were left out under a mechanism whose ε is that of consecutive draws."""
        given, before = self.in_hand, self._released
        if mechanism.needs_every_draw and before is not None and self.last != before + 1:
            raise ValueError(
                f"draws {before + 1} to {self.last - 1} were left out (engine.drop_draw(), or a loop that left "
                f"the loader before its end), but with sampling {mechanism.sampling.kind!r} and noise "
                f"{mechanism.noise.kind!r} epsilon is that of draws that follow each other. Load a checkpoint into a "
                "new engine, start another training from the original model, or take PoissonSampling and "
                "IndependentNoise without a schedule."
            )
        is_summed = given is None or (given.stage is Stage.SUMMED and given.last_of_draw)
        if given is not None and given.draw == self.last and not is_summed:
            raise ValueError(
                "the draw is not finished: a physical batch of it had no backward pass, so its sum may not be stepped "
                "with. Run forward and backward once on every physical batch before the step. If one raised an error, "
                "do not go on with this draw, but take a new one (with PrivacyEngine after engine.drop_draw(), which "
                "counts the old one as a step)."
            )

    def require_summed(self) -> BatchInHand:
        """Return the batch in hand, whose sum was formed.

        Raises:
            ValueError: it was not.
        """
        if (given := self.in_hand) is None or given.stage is not Stage.SUMMED:
            raise ValueError(
                "optimizer.step() was called without a loss.backward() on a batch of the private loader since the "
                "last step: call each of them once for every batch of the loader, one backward, one step. If one was "
                "interrupted, call engine.drop_draw(), which counts the draw as a step, and take the next batch."
            )
        return given

    def end_release(self) -> None:
        """The last draw was released, and its step is taken."""
        self._released = self.last
        if self.in_hand is not None:
            self.in_hand.stage = Stage.DONE
