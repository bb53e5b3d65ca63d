"""Audits of one training: the last rows of the data are canaries, of which a secret coin leaves out each with
probability ½.

After training somebody who does not know the coins guesses, by a score of each canary, which were in. With too many
right guesses the claimed ε is refuted (:func:`.estimators.one_run_epsilon_lower_bound`). The numbers of canaries and
guesses are fixed before, and two scores are compared, each at half of the error.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Subset
from transformers import TrainerCallback

from ..runtime import distributed
from ..runtime.randomness import seeded_global_generators

logger = logging.getLogger(__name__)

_COINS = 0xC0145  # separates the coins from what else is drawn from a secret
_STEP = 0.05  # of a difference quotient, as a share of the way


@dataclass(frozen=True)
class AuditConfig:
    """Audit a training by canaries: the last ``num_canaries`` rows of ``train_dataset``, of which a secret coin leaves
    each out with probability ½.

    Attributes:
        num_canaries: Their number. A hundred or more: all guesses right on m of them show at most ε ≈ log(m / 3).
        num_guesses: How many canaries are guessed: half of them, with the largest scores, to be in, and half of them,
            with the smallest scores, to be out. Default: a fifth of the canaries.
        every_step: Score each step's released gradient, as an attacker does who sees all of them; each step then takes
            two forward passes over all canaries. Otherwise the way from the first to the last weights is scored.
        confidence: Of the bounds.

    Example::

        >>> from dp_transformers import AuditConfig
        >>> AuditConfig(num_canaries=200).guesses  # DPTrainer(..., audit=AuditConfig(num_canaries=200))
        40
    """

    num_canaries: int
    num_guesses: int | None = None
    every_step: bool = False
    confidence: float = 0.95

    def __post_init__(self) -> None:
        if not 2 <= self.guesses <= self.num_canaries:
            raise ValueError(
                f"{self.guesses} guesses on {self.num_canaries} canaries: take 10 canaries or more, and at least 2 "
                "guesses, but no more guesses than canaries."
            )

    @property
    def guesses(self) -> int:
        return 2 * (self.num_canaries // 10) if self.num_guesses is None else self.num_guesses

    @property
    def each(self) -> float:
        """The confidence of each of the two scores."""
        return 1 - (1 - self.confidence) / 2


@dataclass(frozen=True)
class OneRunBound:
    """What one score of the canaries shows.

    Attributes:
        correct: How many guesses were right.
        epsilon: The lower bound on ε at δ of any mechanism.
        gaussian_epsilon: That of a mechanism which is as private as one Gaussian mechanism at every δ.
        of_members, of_others: The scores of canaries that were in and that were not, for
            :func:`.membership.membership_report`.
    """

    correct: int
    epsilon: float
    gaussian_epsilon: float
    of_members: np.ndarray
    of_others: np.ndarray


class CanaryAudit(TrainerCallback):
    """Takes canaries out of the data of a trainer, scores all of them, and says what the guesses show.

    Attributes:
        result: By "loss" (how much the loss fell) and "gradient" (how far the releases went against the canary's own
            gradient); empty before the training has ended.
    """

    def __init__(self, config: AuditConfig, trainer: Any):
        rows, args = trainer.train_dataset, trainer.args
        self.config, self.result = config, dict[str, OneRunBound]()
        self._trainer, first, count = trainer, len(rows) - config.num_canaries, len(rows)
        if args.privacy_unit_column is not None:
            raise ValueError(
                "canaries are single rows, and privacy_unit_column draws persons: audit a training by rows, or the "
                "private step of this one (dp-transformers audit)."
            )
        if first < 1:
            raise ValueError(
                f"the last {config.num_canaries} rows of train_dataset are canaries, and it has {count}: append the "
                "canaries to the rows that are always trained on."
            )
        secret = distributed.shared_secret(args.dp_seed)
        self._is_in = np.random.default_rng([secret, _COINS]).random(config.num_canaries) < 0.5
        self._canaries = _part(rows, range(first, count))
        trainer.train_dataset = _part(rows, [*range(first), *(first + np.flatnonzero(self._is_in)).tolist()])
        self._before = self._slopes = np.zeros(config.num_canaries)
        self._weights: list[torch.Tensor] = []
        trainer.add_callback(self)
        self._announce(config.num_canaries, config.guesses, args.target_delta)

    def _announce(self, canaries: int, guesses: int, delta: float) -> None:
        from .estimators import largest_one_run_bound  # scipy.stats takes half a second to import

        largest = largest_one_run_bound(canaries, guesses, delta, self.config.each)
        self._trainer._say(
            f"audit: each of the last {canaries} rows is in the data with probability 1/2, and {guesses} guesses can "
            f"show epsilon >= {largest:.3g} at delta={delta:g} at most."
        )
        if 2 * canaries * delta > (1 - self.config.confidence) / 10:
            logger.warning(
                "2 * %d canaries * delta=%g is %.2g, which eats the bound of any mechanism, whose error is %.2g: take "
                "fewer canaries or a smaller delta. The bound that supposes a Gaussian mechanism does not suffer.",
                canaries, delta, 2 * canaries * delta, 1 - self.config.each,
            )  # fmt: skip

    # ---- what Trainer calls ----

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step:
            raise ValueError(
                "an audited training cannot be resumed, since its coins are kept in memory alone: train without "
                "audit=, or from the start in another output_dir."
            )
        self._weights, self._before = self._copies(), self._losses()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.config.every_step:
            down = [-cast(torch.Tensor, p.grad) for p in self._parameters()]
            self._slopes = self._slopes + self._fall(self._copies(), down)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        fell = self._before - self._losses()
        if not self.config.every_step:
            way = [p.detach() - before for p, before in zip(self._parameters(), self._weights, strict=True)]
            self._slopes = self._fall(self._weights, way)
        self.result = {"loss": self._bound(fell), "gradient": self._bound(self._slopes)}
        self._weights = []
        for name, found in self.result.items():
            self._trainer._say(
                f"audit by {name}: {found.correct} of {self.config.guesses} guesses are right, which shows epsilon >= "
                f"{found.epsilon:.3g}, and {found.gaussian_epsilon:.3g} if the mechanism is like a Gaussian one "
                f"(claimed: {self._trainer.privacy_spent().epsilon:.3g})."
            )

    # ---- scores ----

    def _bound(self, scores: np.ndarray) -> OneRunBound:
        from .estimators import one_run_epsilon_lower_bound, one_run_fdp_epsilon_lower_bound

        config, delta, order = self.config, self._trainer.args.target_delta, np.argsort(scores, kind="stable")
        most = config.guesses - config.guesses // 2
        correct = int(self._is_in[order[-most:]].sum() + (~self._is_in[order[: config.guesses // 2]]).sum())
        numbers = config.num_canaries, config.guesses, correct, delta, config.each
        bounds = one_run_epsilon_lower_bound(*numbers), one_run_fdp_epsilon_lower_bound(*numbers)
        return OneRunBound(correct, *bounds, scores[self._is_in], scores[~self._is_in])

    def _parameters(self) -> list[torch.Tensor]:
        return [p for p in self._trainer.model.parameters() if p.requires_grad]

    @torch.no_grad()
    def _losses(self) -> np.ndarray:
        """Return the (m,) losses of all canaries at the weights of now, without dropout."""
        trainer = self._trainer
        collate = trainer._get_collator_with_removed_columns(trainer.training_collator(), description="training")
        # the rows are those of the training set, and each rank scores all of them
        loader = DataLoader(self._canaries, trainer.args.per_device_eval_batch_size, collate_fn=collate)
        trains = trainer.model.training
        trainer.model.eval()
        with seeded_global_generators([trainer.args.seed], trainer.args.device):
            losses = [trainer._losses_of(**trainer._prepare_inputs(rows)).float().cpu() for rows in loader]
        trainer.model.train(trains)
        return torch.cat(losses).double().numpy()

    @torch.no_grad()
    def _fall(self, start: list[torch.Tensor], way: list[torch.Tensor]) -> np.ndarray:
        """Return how fast the (m,) losses fall on a way from ``start``: the dot product with minus the gradients."""
        kept, ends = self._copies(), []
        for sign in (-_STEP, _STEP):
            for p, x, direction in zip(self._parameters(), start, way, strict=True):
                p.data.copy_(x + sign * direction)
            ends.append(self._losses())
        for p, x in zip(self._parameters(), kept, strict=True):
            p.data.copy_(x)
        return (ends[0] - ends[1]) / (2 * _STEP)

    def _copies(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self._parameters()]


def _part(rows: Any, indices: Any) -> Any:
    return rows.select(indices) if hasattr(rows, "select") else Subset(rows, list(indices))
