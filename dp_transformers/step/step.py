"""The private step: from the physical batches of one draw to the one noised gradient that an optimizer steps with.

DPTrainer and PrivacyEngine run the same :class:`PrivateStep`. It holds the contract of a release, and checks it in
each step of both loops.

* Draws follow each other, each is worked on in full, and none is left out (:mod:`.step.order`).
* A row of a batch is one example, unmixed with others (:meth:`PrivateStep.before_forward`), and forward and backward
  run once over it (:meth:`PrivateStep.add`).
* Random numbers are seeded from a secret before every forward pass (:meth:`PrivateStep.before_forward`).
* Some rows of a batch are run alone and compared, if something about the batch is new, and at random in others
  (:meth:`PrivateStep.check`).
* The step owns the clipped sums and the clipping function, and hands both to the clipper: ``p.grad`` is None until the
  release, so whatever a loop does to it has no part in the sum (:meth:`PrivateStep.add`).
* The step is on the ledger before its noise exists (:meth:`PrivateStep.release`).
* No optimizer steps with gradients of the private parameters that were not released (:mod:`.step.releases`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch

from ..checks.validation import validate_optimizer
from ..clipping import PerExampleClipper
from ..clipping.checks.rows import LossFunction
from ..clipping.errors import SelfCheckError
from ..clipping.loss_graph import BatchLoss
from ..data.draws import LogicalBatch, LogicalBatches, PhysicalBatch
from ..data.refused import refuse_mixed
from ..mechanism.clipping_functions import AdaptiveClipping, ClippingFunction
from ..noise.add_noise import add_noise_and_divide
from ..noise.generators import Dither, ShardedNoise
from ..noise.optimizers import set_noise_variance
from ..runtime import distributed
from ..runtime.randomness import SecretSeeds, require_unseeded
from .order import BatchInHand, DrawOrder, Stage
from .releases import NoisedShare, PrivateLoss, ReleasedGradients, loss_release
from .run import PrivateRun

logger = logging.getLogger(__name__)

_ONE_LOSS = "make_private refuses a loop that hands over one loss"


class PrivateStep:
    """Clips and sums the physical batches of one draw, then releases the noised sum.

    Args:
        clipper: The clipper of the model that is trained.
        run: The private run, which counts the releases.
        seeds: The seeds of dropout and augmentation.
        data: The source of the draws, and of rows of weight 0 for ranks that have no examples left.
        secure: True to draw noise from a cryptographic generator.
        announce: A function of a sentence, called when the self-check has passed.
        at_least: The smallest number of physical batches of a draw, for loops that must see one to go on; ``data``
            may need more.
        own_optimizer: The optimizer that releases when it steps (PrivacyEngine); None if the release comes before any
            optimizer steps (DPTrainer).
        reduce_every_batch: True to reduce-scatter sums of parameters that FSDP2 shards after every physical batch.
            Otherwise whole sums are kept until the last batch of a draw.

    Attributes:
        gradients: Refuses optimizers that would step with gradients that were not released.
        order: The order of draws and physical batches, with the batch that is worked on.
        loss: The noised mean of the losses of the last released draw, of shape (); None before, and if no loss is
            released.
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
        reduce_every_batch: bool = True,
    ):
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
        self._announce = announce
        self._lengths_that_came, self._is_chosen_length = set[int](), False  # of rows that were padded before
        self._at_least, self._own_optimizer = max(at_least, data.batches_per_draw), own_optimizer
        self._reduce_every_batch, self._place = reduce_every_batch, distributed.place()
        self.order, self._is_closed = DrawOrder(), False

    def close(self) -> None:
        """Let optimizers step as before, drop the draw that is worked on, and hand out no other."""
        self.gradients.close()
        self.drop()
        self._is_closed = True

    @property
    def number(self) -> int:
        """The step of the last draw, counted from 0; -1 before the first draw."""
        return self.order.step

    def drop(self) -> bool:
        """Drop the sums of an unfinished draw, so that nobody steps with them. Return True if there was one."""
        self._sums.clear()
        self.gradients.drop(released=False)
        self.run.unfinished = 0
        return self.order.drop()

    @property
    def clipping(self) -> ClippingFunction:
        """The clipping function of this step, which its noise is made for."""
        return self.run.clipping_at(self.number)

    # ---- draws ----

    def physical_batches(self, draw: LogicalBatch) -> Iterator[BatchInHand]:
        """Yield the physical batches of a draw one after the other, and end if it is dropped. If parameters are
        sharded, every rank gets the same number of batches."""
        if self._is_closed:
            raise RuntimeError(
                "the private training of this loader has ended (engine.detach()), so nobody would clip its draws, add "
                "noise or count them. Iterate over your own DataLoader, or call make_private again."
            )
        self._require_same_processes()
        self.order.begin(draw)
        self._sums.clear()
        self.gradients.drop()
        for further in (self._private_loss, self._share):
            if further is not None:
                further.begin_draw()
        batches, clipper = list(draw.batches), self.clipper
        clipper.engine.begin_draw()
        clipper.look_at_memory(self._released, partial(distributed.min_over_ranks, device=clipper.trainable.device))
        rounds = max(
            self._at_least,
            distributed.max_over_ranks(len(batches), clipper.trainable.device)
            if clipper.trainable.shards
            else len(batches),
        )
        batches += [self._data.filler() for _ in range(rounds - len(batches))]
        for i, batch in enumerate(batches):
            if self.order.is_dropped(draw) or self._is_closed:
                return
            given = self.order.hand_out(batch, draw, is_last=i == len(batches) - 1)
            self.run.unfinished = int(self._own_optimizer is not None)
            self._seeds.reseed()  # for what a loop does with the batch before the model sees it
            if self._own_optimizer is None:  # DPTrainer's next call computes the losses
                clipper.engine.state.before_forward()
            yield given

    def _require_same_processes(self) -> None:
        if (now := distributed.place()) != self._place:
            (rank, count), (rank_now, count_now) = self._place, now
            raise ValueError(
                f"the private training was set up as process {rank} of {count}, and this is process {rank_now} of "
                f"{count_now} now: several of them could draw one example, and epsilon would be too small. Make the "
                "process group (init_process_group, Accelerator(), the launch of Fabric or Lightning) before "
                "make_private or DPTrainer, and keep it to the end."
            )

    # ---- before a forward pass (the clipper asks) ----

    def before_forward(self, args: tuple, kwargs: dict) -> None:
        """Refuse rows that the loop mixed, and seed the random numbers. In a loop of PrivacyEngine, check a batch of a
        new kind."""
        given = self.order.current
        # rows that are neither the loaded ones nor mixtures of them may have been augmented
        if given is not None and refuse_mixed(given.batch.rows, (args, kwargs), given.batch.size):
            require_unseeded("the training loop, after it took a batch")
        self._seeds.reseed()
        if self._own_optimizer is not None:
            self.check(args, kwargs)

    def after_forward(self, output: Any) -> None:
        """Let the backward pass of PrivacyEngine's loop refuse gradients at a row's padding. DPTrainer's losses are
        compared themselves."""
        if self.order.in_hand is not None and self._own_optimizer is not None:
            self.clipper.expect_no_gradient_at_padding(output, self.order.in_hand.batch.sizes)

    def current_batch(self) -> BatchInHand | None:
        """Return the physical batch that is worked on; None between two batches."""
        return self.order.current

    def check(self, args: tuple, kwargs: dict, loss_function: LossFunction | None = None) -> None:
        """Compare rows of the batch in hand with each alone, if something about them is new
        (:meth:`.PerExampleClipper.compare`).

        Raises:
            SelfCheckError: clipping is not exact for such a batch, or its padding changes gradients.
        """
        given, clipper = self.order.in_hand, self.clipper
        if given is None:
            return
        clipper.require_same_parameters()  # before a check meets what was changed
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
        """Return how a batch is padded, by columns and by the arguments of a call; () if its rows came padded to a
        length that was chosen."""
        if batch.came_padded:
            self._lengths_that_came |= {max(own) for of in batch.sizes.values() for _, own in of.values()}
            if self._is_chosen_length:
                return ()
        return batch.sizes, batch.sizes_of

    def _require_chosen_length(self, batch: PhysicalBatch, error: SelfCheckError) -> None:
        """Raise ``error`` unless rows came padded to one length, which may have been chosen, and not decided by a
        row."""
        if not batch.came_padded or len(self._lengths_that_came) > 1 or self._is_chosen_length:
            raise error
        if self._data.has_one_longest():
            raise SelfCheckError(
                f"{error} One row alone fills the positions that rows came padded to, so it seems to have decided "
                "their number. If you chose it, choose more, so that no row fills them (max_length)."
            ) from error
        self._is_chosen_length = True
        logger.warning(
            "rows came padded to one length, %d, which several rows fill. If it is the length of the longest example, "
            "and was not chosen without looking at the data, this is not private: %s",
            *self._lengths_that_came, error,
        )  # fmt: skip

    # ---- clipped sums ----

    def add(self, losses: torch.Tensor | BatchLoss, weights: torch.Tensor | None = None) -> torch.Tensor:
        """Add the clipped gradients of the batch in hand to the sums of its draw.

        Args:
            losses: (B,) with graph, one for each row of the batch; or the loss of the batch in a ``loss.backward()``.
                Those of a unit's rows are averaged.
            weights: (B,) in [0, 1], default ones; (U,) of units.

        Returns:
            (B,) float32: the gradient norms before clipping; (U,) of units, if the batch has units of several rows.
            They are private data.

        Raises:
            ValueError: no sum may be formed of this batch, or of these losses.
        """
        given = self.order.begin_sum(self.clipper.engine.require_forward(losses).batch_size)
        require_unseeded("the model's forward pass, or what ran between it and backward()")
        given.stage = Stage.SUMMING
        batch, unit_ids = given.batch, None
        own, sizes = batch.examples, batch.unit_sizes
        if sizes is not None and len(sizes) < own:
            assert isinstance(losses, torch.Tensor), _ONE_LOSS
            own = len(sizes)
            losses, unit_ids = _averaged(losses, [*sizes, *[1] * batch.fillers])
        if batch.fillers:
            own_b = (torch.arange(own + batch.fillers) < own).float()
            weights = own_b if weights is None else weights * own_b.to(weights)
        self._sums.reduces = self._reduce_every_batch or given.last_of_draw
        norms = self.clipper.backward(losses, weights, unit_ids=unit_ids, clipping=self.clipping, into=self._sums)
        given.stage = Stage.SUMMED
        if self._private_loss is not None:
            assert isinstance(losses, torch.Tensor), _ONE_LOSS
            means = losses.detach()
            means = means if unit_ids is None else torch.zeros_like(norms).index_add_(0, unit_ids, means.to(norms))
            self._private_loss.add(means, weights)
        if self._share is not None:
            self._share.add(norms[:own], self.clipping.sensitivity)
        return norms

    def clipped_sums(self) -> dict[str, torch.Tensor]:
        """Return copies of the clipped sums of the unfinished draw, by parameters' names. They have no noise, and are
        private data."""
        sums = ((name, self._sums[p]) for name, p in self.clipper.model.named_parameters())
        return {name: total.clone() for name, total in sums if total is not None}

    # ---- the release ----

    def release(self, optimizer: torch.optim.Optimizer) -> None:
        """Set ``p.grad = (sum over ranks + σ·C·N(0, I)) / expected batch size``, with the noise of each group scaled
        by the clipping function, and ``loss`` to the noised mean of losses if it is released. The step is counted
        before any noise exists. ``optimizer`` steps with it afterwards.

        Raises:
            ValueError: the draw is not finished, or ``optimizer`` has other parameters than those that are released.
                Nothing is released.
            RuntimeError: the budget is spent. Nothing is released.
        """
        clipper, order = self.clipper, self.order
        self._require_same_processes()
        clipper.trainable.shards.reshard()
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if stepped != self._trained or optimizer is not self._validated:
            validate_optimizer(optimizer, clipper.model)
            self._validated = optimizer
        clipper.engine.end_draw()
        order.require_finished(self.run.mechanism)
        # the program waits for the device here, and before this in clipping alone
        distributed.require_on_all(clipper.engine.deferred_checks.require, clipper.trainable.device, draw=order.last)
        self.run.verified = self.run.verified and clipper.self_check
        used = self.run.spend_step(self.number)
        if clipper.trainable.shards:
            distributed.wait_for_all()  # each rank adds its own noise, and none before the line is on the ledger
        summed = bool(clipper.trainable.shards or clipper.trainable.parallel)
        relative_std = self.run.mechanism.noise.relative_std(self._released)
        scales = clipper.noise_scales_of(self.clipping)
        if order.in_hand is not None:
            order.in_hand.stage = Stage.SUMMING  # interrupted from here on, the sum is gone
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
        variance = (relative_std * used.noise_std / used.expected_batch_size) ** 2
        for p, scale in zip(clipper.parameters, scales, strict=True):  # with this gradients count as released
            set_noise_variance(cast(torch.Tensor, p.grad), variance * scale**2)
        if self._share is not None:
            clipping = cast(AdaptiveClipping, self.clipping)
            self.run.move(clipping.moved(self._share.release(clipping, used.expected_batch_size)))
        order.end_release()
        self.run.unfinished = 0

    def finish_batch(self, optimizer: torch.optim.Optimizer) -> None:
        """End a physical batch when ``optimizer.step()`` of a loop is called. Release the draw after its last one.

        Raises:
            ValueError: no clipped sum was formed of the batch.
        """
        given = self.order.require_summed()
        if given.last_of_draw:
            self.release(optimizer)
        else:
            self.gradients.drop()  # the optimizer steps with nothing
            given.stage = Stage.DONE


def _averaged(losses_b: torch.Tensor, sizes: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the losses of rows, each divided by the number of rows of its unit, and the (B,) ids of the units."""
    sizes_u = torch.tensor(sizes, device=losses_b.device)
    unit_ids = torch.arange(len(sizes), device=losses_b.device).repeat_interleave(sizes_u)
    return losses_b / sizes_u[unit_ids], unit_ids
