"""The private step: from the physical batches of one draw to the one noised gradient that an optimizer steps with.

DPTrainer and PrivacyEngine run the same :class:`PrivateStep`. It holds the contract of a release. Every part of the
contract is checked in each step of both loops, when it matters, and not once before training.

* Draws come one after the other, each is worked on in full, and none is left out
  (:meth:`PrivateStep.physical_batches`).
* A row of a batch is one example, unmixed with others (:meth:`PrivateStep.before_forward`), and forward and backward
  run once over it (:meth:`PrivateStep.begin_sum`).
* Random numbers are seeded from a secret before every forward pass (:meth:`PrivateStep.before_forward`).
* Clipping is compared with one row at a time whenever something about a batch is new, and by chance
  (:meth:`PrivateStep.check`).
* The step owns the clipped sums and what clips, and hands both to the clipper: ``p.grad`` is None until the release,
  so nothing that a loop does to it has a part in what is noised (:meth:`PrivateStep.add`). The step is on the ledger
  before its noise exists (:meth:`PrivateStep.release`).
* No optimizer steps with gradients of the private parameters that were not released (:mod:`.step.gradients`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any, cast

import torch

from ..checks.validation import validate_optimizer
from ..clipping import PerExampleClipper
from ..clipping.checks.outputs import LossFunction
from ..clipping.errors import SelfCheckError
from ..clipping.gradient_sums import GradientSums
from ..clipping.loss_graph import BatchLoss
from ..data.draws import LogicalBatch, LogicalBatches, PhysicalBatch
from ..data.mixup import refuse_mixed
from ..losses.heads import refuse_targets_padded_on_the_left
from ..mechanism.clipping_functions import AdaptiveClipping, ClippingFunction
from ..mechanism.mechanism import Mechanism
from ..noise.add_noise import add_noise_and_divide
from ..noise.generators import Dither
from ..noise.optimizers import set_noise_variance
from ..noise.sharded import ShardedNoise
from ..runtime import distributed
from ..runtime.randomness import SecretSeeds, require_unseeded
from .gradients import ReleasedGradients
from .releases import LOSS, NoisedShare, PrivateLoss, loss_release
from .run import PrivateRun

logger = logging.getLogger(__name__)


class _Stage(Enum):
    GIVEN, SUMMING, SUMMED, DONE = auto(), auto(), auto(), auto()


@dataclass(eq=False)
class Given:
    """A physical batch in the hands of the loop, with the stage it is in.

    Attributes:
        draw: The number of the draw that the batch is a part of.
        last_of_draw: Whether it is the last physical batch of that draw.
        refusal: Why no sum may be formed of it; None if one may.
    """

    batch: PhysicalBatch
    draw: int
    last_of_draw: bool
    refusal: str | None = None
    stage: _Stage = _Stage.GIVEN


class PrivateStep:
    """Clips and sums the physical batches of one draw, then releases the noised sum.

    Args:
        clipper: The clipper of the model that is trained.
        run: It counts the releases.
        seeds: They seed the random numbers of dropout and augmentation.
        data: The source of the draws, and of rows of weight 0 for ranks that have no examples left.
        secure: Whether noise comes from a cryptographic generator.
        announce: It is called with a sentence when the self-check has passed.
        at_least: The smallest number of physical batches of a draw, for loops that must see one to go on; ``data``
            may say a larger one.
        own_optimizer: The optimizer that releases when it steps (PrivacyEngine); None where the release comes before
            any optimizer steps (DPTrainer).
        label_names: The names of the model's labels.
        reduce_every_batch: Whether sums of parameters that FSDP2 shards are reduce-scattered after every physical
            batch. If not, whole sums are kept until the last batch of a draw.

    Attributes:
        gradients: What keeps optimizers from gradients that were not released.
        given: The physical batch in the hands of the loop; None where there is none.
        number: The step that the last draw is for, counted from 0; -1 before the first draw.
        loss: The noised mean of the losses of the draw that was released last, of shape (); None before, and where it
            is not released.
    """

    def __init__(
        self,
        clipper: PerExampleClipper,
        run: PrivateRun,
        seeds: SecretSeeds,
        data: LogicalBatches,
        *,
        secure: bool,
        announce: Callable[[str], None],
        at_least: int = 0,
        own_optimizer: torch.optim.Optimizer | None = None,
        label_names: Sequence[str] = ("labels",),
        reduce_every_batch: bool = True,
    ):
        _refuse_what_no_step_does(run.mechanism)
        self.clipper, self.run, self._seeds, self._data = clipper, run, seeds, data
        source = {"dp_seed": run.dp_seed, "secure": secure}
        self._noise = run.mechanism.noise.source(clipper, **source)
        self._dither = (
            ShardedNoise(clipper, **source, warn=False, stream=Dither, same=True)
            if getattr(self._noise, "is_dithered", False)
            else None
        )
        release, is_adaptive = loss_release(run.mechanism), isinstance(run.mechanism.clipping, AdaptiveClipping)
        self._private_loss = None if release is None else PrivateLoss(release, clipper, **source)
        self._share = NoisedShare(clipper, **source) if is_adaptive else None
        self.gradients, self._sums = ReleasedGradients(clipper, own_optimizer), clipper.empty_sums()
        self.loss: torch.Tensor | None = None
        self._trained, self._validated = {id(p) for p in clipper.parameters}, own_optimizer
        self._released = 0  # how many steps the noise source has served
        self._announce, self._label_names = announce, list(label_names)
        self._lengths_that_came, self._is_chosen_length = set[int](), False  # of rows that were padded before
        self._at_least, self._own_optimizer = max(at_least, data.batches_per_draw), own_optimizer
        self._reduce_every_batch, self._place = reduce_every_batch, distributed.place()
        self.given: Given | None = None
        self.number = -1
        self._last_draw = -1  # the number of the last draw that came
        self._summed_draw = -1  # the number of the draw that the sums belong to
        self._last_released: int | None = None  # number of the last draw that was released, or that before the first
        self._dropped_draw = -1  # the number of the last draw that was dropped
        self._is_closed = False

    def close(self) -> None:
        """Stop looking at optimizers, drop the draw that is worked on, and give no other."""
        self.gradients.close()
        self.drop()
        self._is_closed = True

    @property
    def _has_ranks(self) -> bool:
        """Whether other processes have batches of the draw, too: which rows are theirs depends on all of them."""
        return self._place[1] > 1

    @property
    def is_unfinished(self) -> bool:
        """Whether the loop was given a draw that no step was taken for."""
        return self.given is not None and not (self.given.stage is _Stage.DONE and self.given.last_of_draw)

    def drop(self) -> bool:
        """Drop the sums of an unfinished draw, so that nobody steps with them, and return whether there was one."""
        self._sums.clear()
        self.gradients.drop(released=False)
        unfinished = self.is_unfinished
        self.given, self.run.unfinished, self._dropped_draw = None, 0, self._last_draw
        return unfinished

    @property
    def clipping(self) -> ClippingFunction:
        """The clipping function of this step, which its noise is made for."""
        return self.run.clipping_at(self.number)

    # ---- draws ----

    def physical_batches(self, draw: LogicalBatch) -> Iterator[Given]:
        """Yield the physical batches of a draw one after the other. Where parameters are sharded, every rank is given
        as many. A draw that is dropped ends."""
        if self._is_closed:
            raise RuntimeError(
                "the private training that this loader belongs to has ended (engine.detach()), so nobody would clip "
                "its draws, add noise or count them. Iterate over your own DataLoader, or call make_private again."
            )
        self._require_same_processes()
        self._require_next(draw)
        self.number = draw.step
        self._begin_draw()
        batches, clipper = list(draw.batches), self.clipper
        clipper.begin_draw()
        clipper.look_at_memory(self._released, partial(distributed.min_over_ranks, device=clipper.device))
        rounds = max(
            self._at_least,
            distributed.max_over_ranks(len(batches), clipper.device) if clipper.shards else len(batches),
        )
        batches += [self._data.filler() for _ in range(rounds - len(batches))]
        for i, batch in enumerate(batches):
            if draw.number <= self._dropped_draw or self._is_closed:
                return
            refusal = self._left_undone(draw.number)
            self.given = Given(batch, draw.number, i == len(batches) - 1, refusal)
            self.run.unfinished = int(self._own_optimizer is not None)
            self._seeds.reseed()  # for what a loop does with the batch before the model sees it
            if self._own_optimizer is None:  # DPTrainer's next call computes the losses
                clipper.begin_pass()
            yield self.given

    def _require_same_processes(self) -> None:
        if (now := distributed.place()) != self._place:
            (rank, count), (rank_now, count_now) = self._place, now
            raise ValueError(
                f"the private training was set up as process {rank} of {count}, which draws its part of the examples, "
                f"and this is process {rank_now} of {count_now} now: an example could be drawn by several of them, "
                "and epsilon would be too small. Make the process group (init_process_group, Accelerator(), the "
                "launch of Fabric or Lightning) before make_private or DPTrainer, and keep it to the end."
            )

    def _begin_draw(self) -> None:
        self._sums.clear()
        self.gradients.drop()
        if self._private_loss is not None:
            self._private_loss.begin_draw()
        if self._share is not None:
            self._share.begin_draw()

    def _require_next(self, draw: Any) -> None:
        if not isinstance(draw, LogicalBatch):
            raise ValueError(
                f"the train dataloader gave a {type(draw).__name__}, and not the draws that epsilon is computed "
                "for: it was replaced. Leave get_train_dataloader as it is; pass train_dataset and "
                "data_collator."
            )
        last, self._last_draw = self._last_draw, max(draw.number, self._last_draw)
        if last < 0:
            self._last_released = draw.number - 1
        if draw.number <= last:
            raise RuntimeError(
                "a draw was replayed by the train dataloader, so the examples are not drawn as epsilon assumes: do "
                "not cache or repeat its batches."
            )
        if last >= 0 and draw.number != last + 1 and not draw.starts_pass:
            raise RuntimeError(
                "a draw was left out by the train dataloader, so the examples are not drawn as epsilon assumes: do "
                "not skip or reorder its batches."
            )

    def _left_undone(self, draw: int) -> str | None:
        before = self.given
        if before is None or (before.stage is _Stage.DONE and (before.last_of_draw or before.draw == draw)):
            return None
        if before.stage is _Stage.SUMMED and before.draw != draw:
            return (
                "loss.backward() ran on a new draw before optimizer.step() was called for the one before. Every draw "
                "is one step: call optimizer.step() after every backward. For larger batches raise the DataLoader's "
                "batch_size and set max_physical_batch_size."
            )
        if before.stage is _Stage.SUMMED:
            return None
        return (
            "the loader was asked for another batch before loss.backward() ran on the one before. Run backward and "
            "optimizer.step() on every batch before you take the next, and before break: which examples take part in "
            "a step must not depend on data. Do not peek with next(iter(loader)), and do not prefetch batches "
            "yourself (num_workers of the DataLoader loads ahead safely). If an error or Ctrl-C stopped the loop, "
            "call engine.drop_draw(), which counts the draw as a step, and take the next batch."
        )

    # ---- before a forward pass (the clipper asks) ----

    def before_forward(self, args: tuple, kwargs: dict) -> None:
        """Refuse rows that the loop mixed. Seed the random numbers, and in a loop of the user's check a batch of a new
        kind."""
        given = self.current_batch()
        # rows that are not the loaded ones, and no mixtures of them, may have been augmented
        if given is not None and refuse_mixed(given.batch.rows, (args, kwargs), given.batch.size):
            require_unseeded("the training loop, after it took a batch")
        self._seeds.reseed()
        if self._own_optimizer is not None:
            self.check(args, kwargs)

    def after_forward(self, output: Any) -> None:
        """Let a loop's backward pass refuse gradients at a row's padding. DPTrainer's losses are looked at
        themselves."""
        if self.given is not None and self._own_optimizer is not None:
            self.clipper.expect_no_gradient_at_padding(output, self.given.batch.sizes)

    def current_batch(self) -> Given | None:
        """Return the physical batch that is worked on; None between the batches."""
        return None if self.given is None or self.given.stage is _Stage.DONE else self.given

    def check(self, args: tuple, kwargs: dict, loss_function: LossFunction | None = None) -> None:
        """Compare rows of the batch in the hands of the loop with each alone, if something about them is new
        (:meth:`.PerExampleClipper.compare`).

        Raises:
            SelfCheckError: clipping is not exact for such a batch, or its padding changes gradients.
        """
        given, clipper = self.given, self.clipper
        if given is None:
            return
        clipper.require_same_parameters()  # before a check meets what was changed
        if clipper.self_check:
            refuse_targets_padded_on_the_left(clipper.model, kwargs, self._label_names)
        secret = self._seeds.number(f"row of draw {given.draw}")
        compare = partial(clipper.compare, args, kwargs, loss_function, secret=secret)
        try:
            seconds = compare(*self._how_padded(given.batch))
        except SelfCheckError as error:
            self._require_chosen_length(given.batch, error)
            seconds = compare()
        if seconds is not None:
            self._announce(
                f"self-check passed in {seconds:.1f} s: rows of the first batch have the gradients, the clipped sum "
                "and the losses that they have one at a time"
            )

    def _how_padded(self, batch: PhysicalBatch) -> tuple[Any, ...]:
        """Return how a batch is padded, by columns and by the arguments of a call; nothing where rows came padded to
        a length that was chosen."""
        if batch.came_padded:
            self._lengths_that_came |= {max(own) for of in batch.sizes.values() for _, own in of.values()}
            if self._is_chosen_length:
                return ()
        return batch.sizes, batch.sizes_of

    def _require_chosen_length(self, batch: PhysicalBatch, error: SelfCheckError) -> None:
        """Raise what was found of rows that others pad. Those that came padded to one length may all have one that was
        chosen, and that no row decides."""
        if not batch.came_padded or len(self._lengths_that_came) > 1 or self._is_chosen_length:
            raise error
        if self._data.has_one_longest():
            raise SelfCheckError(
                f"{error} One row alone fills the positions that rows came padded to, so it seems to have decided how "
                "many those are. If you chose them, choose more, so that no row fills them (max_length)."
            ) from error
        self._is_chosen_length = True
        logger.warning(
            "rows came padded to one length, %d, which several rows fill. If it is the length of the longest example, "
            "and not one that was chosen without looking at the data, this is not private: %s",
            *self._lengths_that_came, error,
        )  # fmt: skip

    # ---- clipped sums ----

    def add(self, losses: torch.Tensor | BatchLoss, weights: torch.Tensor | None = None) -> torch.Tensor:
        """Add the clipped gradients of the batch in the hands of the loop to the sums of its draw.

        Args:
            losses: (B,) with graph, one for each row of the batch; or the one that a loop went backward from.
            weights: (B,) in [0, 1], default ones.

        Returns:
            (B,) float32: the gradient norms before clipping and weighting. They are private data.

        Raises:
            ValueError: no sum may be formed of this batch, or of these losses.
        """
        own_b, clipping, sums = self.begin_sum(self.clipper.require_forward(losses).batch_size)
        if own_b is not None:
            weights = own_b if weights is None else weights * own_b.to(weights)
        norms_b = self.clipper.backward(losses, weights, clipping=clipping, into=sums)
        self.end_sum(None if isinstance(losses, BatchLoss) else losses.detach(), weights)
        return norms_b

    def clipped_sums(self) -> dict[str, torch.Tensor]:
        """Copies of the clipped sums of the unfinished draw by the parameters' names, without noise. They are private
        data."""
        sums = ((name, self._sums[p]) for name, p in self.clipper.model.named_parameters())
        return {name: total.clone() for name, total in sums if total is not None}

    def begin_sum(self, batch_size: int) -> tuple[torch.Tensor | None, ClippingFunction, GradientSums]:
        """Return what the clipped gradients of the batch in the hands of the loop are multiplied with (None: ones),
        what clips them, and what they are added to.

        Raises:
            ValueError: no sum may be formed of this batch.
        """
        given = self.given
        if given is None:
            raise ValueError(
                "loss.backward() ran on data that did not come from the loader that make_private returned, or on a "
                "draw that was dropped since (engine.drop_draw()): iterate over that loader, and call the model on "
                "its batches."
            )
        if given.refusal is not None:
            raise ValueError(given.refusal)
        if given.stage is _Stage.SUMMING:
            raise ValueError(
                "an earlier backward pass on this batch was interrupted, and may have added a part of its sum. Call "
                "engine.drop_draw(), which counts the draw as a step, and take the next batch."
            )
        if given.stage is not _Stage.GIVEN:
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
        require_unseeded("the model's forward pass, or what ran between it and backward()")
        if given.draw != self._summed_draw:
            self._summed_draw = given.draw
            self._begin_draw()
        given.stage = _Stage.SUMMING
        weights_b = (torch.arange(batch_size) < given.batch.examples).float() if given.batch.fillers else None
        self._sums.reduces = self._reduce_every_batch or given.last_of_draw
        return weights_b, self.clipping, self._sums

    def end_sum(self, losses_b: torch.Tensor | None = None, weights_b: torch.Tensor | None = None) -> None:
        """The batch was added: count its examples, and add their losses where those are released."""
        given = self.given
        assert given is not None  # begin_sum refuses to form a sum without a batch
        given.stage = _Stage.SUMMED
        if self._private_loss is not None:
            assert losses_b is not None, "make_private refuses a loop that hands over one loss for the batch"
            self._private_loss.add(losses_b, weights_b)
        if self._share is not None:
            self._share.add(self.clipper.norms[: given.batch.examples], self.clipping.sensitivity)

    # ---- the release ----

    def release(self, optimizer: torch.optim.Optimizer) -> None:
        """Set ``p.grad = (sum over ranks + σ·C·N(0, I)) / expected batch size``, with the noise of each group scaled
        as the clipping function says, and ``loss`` to the noised mean of losses where that is released. The step is
        counted before any noise exists. ``optimizer`` is what steps with it.

        Raises:
            ValueError: the draw is not finished, or what is released is not what the optimizer steps with. Nothing is
                released.
            RuntimeError: the budget is spent. Nothing is released.
        """
        clipper, given = self.clipper, self.given
        self._require_same_processes()
        clipper.shards.reshard()
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if stepped != self._trained or optimizer is not self._validated:
            validate_optimizer(optimizer, clipper.model)
            self._validated = optimizer
        clipper.end_draw()
        self._require_no_gap()
        if (
            given is not None
            and not (given.stage is _Stage.SUMMED and given.last_of_draw)
            and given.draw == self._last_draw
        ):
            raise ValueError(
                "the draw is not finished: a physical batch of it had no backward pass, so its sum may not be stepped "
                "with. Run forward and backward once on every physical batch before the step. If one raised an error, "
                "do not go on with this draw, but take a new one (with PrivacyEngine after engine.drop_draw(), which "
                "counts the old one as a step)."
            )
        # the program waits for the device here, and before this in clipping alone
        distributed.require_on_all(clipper.conditions.require, clipper.device, draw=self._last_draw)
        self.run.verified = self.run.verified and clipper.self_check
        used = self.run.spend_step(self.number)
        if clipper.shards:
            distributed.wait_for_all()  # each rank adds its own noise, and none before the line is on the ledger
        summed = bool(clipper.shards or clipper.parallel)
        relative_std = self.run.mechanism.noise.relative_std(self._released)
        scales = clipper.noise_scales_of(self.clipping)
        if given is not None:
            given.stage = _Stage.SUMMING  # interrupted from here on, the sum is gone
        self._sums.become_gradients()
        add_noise_and_divide(
            clipper.parameters,
            self._noise,
            dither=self._dither,
            std=used.noise_std,
            relative_std=relative_std,
            divisor=used.expected_batch_size,
            scales=scales,
            sharded=summed,
        )
        self._released += 1
        if self._private_loss is not None:
            self.loss = self._private_loss.release(used.expected_batch_size)
        self._say_noise((relative_std * used.noise_std / used.expected_batch_size) ** 2, scales)
        if self._share is not None:
            clipping = cast(AdaptiveClipping, self.clipping)
            self.run.move(clipping.moved(self._share.release(clipping, used.expected_batch_size)))
        self._last_released, self.run.unfinished = self._last_draw, 0
        if given is not None:
            given.stage = _Stage.DONE

    def _say_noise(self, variance: float, scales: Sequence[float]) -> None:
        """Attach to the gradients the variance of their noise, given that of parameters whose noise is not scaled.
        With this they count as released."""
        for p, scale in zip(self.clipper.parameters, scales, strict=True):
            set_noise_variance(cast(torch.Tensor, p.grad), variance * scale**2)

    def _require_no_gap(self) -> None:
        """Raise ValueError if draws were left out under a mechanism whose ε is that of consecutive draws."""
        mechanism, before = self.run.mechanism, self._last_released
        if mechanism.needs_every_draw and before is not None and self._last_draw != before + 1:
            raise ValueError(
                f"draws {before + 1} to {self._last_draw - 1} were left out (engine.drop_draw(), or a loop that left "
                f"the loader before its end), but with sampling {mechanism.sampling.kind!r} and noise "
                f"{mechanism.noise.kind!r} epsilon is that of draws that follow each other. Load a checkpoint into a "
                "new engine, start another training from the original model, or take PoissonSampling and "
                "IndependentNoise without a schedule."
            )

    def finish_batch(self, optimizer: torch.optim.Optimizer) -> None:
        """Do what ``optimizer.step()`` of a loop asks for: release the draw after its last physical batch, and nothing
        before.

        Raises:
            ValueError: no clipped sum was formed of the batch.
        """
        given = self.given
        if given is None or given.stage is not _Stage.SUMMED:
            raise ValueError(
                "optimizer.step() was called without a loss.backward() on a batch of the private loader since the "
                "last step: call each of them once for every batch of the loader, one backward, one step. If one was "
                "interrupted, call engine.drop_draw(), which counts the draw as a step, and take the next batch."
            )
        if given.last_of_draw:
            self.release(optimizer)
        else:
            self.gradients.drop()  # whatever somebody put there: nothing is stepped with
            given.stage = _Stage.DONE


def _refuse_what_no_step_does(mechanism: Mechanism) -> None:
    """Raise ValueError for a mechanism that releases other sums than the step knows."""
    if [release.name for release in mechanism.releases] not in ([], [LOSS]):
        raise ValueError(
            f"besides the gradient a step releases {LOSS!r} and nothing else, each once, but the mechanism plans "
            f"{[release.name for release in mechanism.releases]}: take these out of releases."
        )
