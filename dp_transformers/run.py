"""One private training: its mechanism, what it has spent and may still spend, and the ledger that says so.

DPTrainer and PrivacyEngine each hold one :class:`PrivateRun`; nothing else counts steps, and nothing is released without a call of
:meth:`PrivateRun.spend_step`.
"""

from __future__ import annotations

import bisect
import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from . import distributed
from .accounting import PrivacyAccountant, group_epsilon
from .checkpoint import Ledger, PrivacyState, PrivacyStateError

logger = logging.getLogger(__name__)

UNIT = "one row of train_dataset"


@dataclass(frozen=True)
class PrivacySpent:
    """What a training has spent so far: (epsilon, delta)-differential privacy for adding or removing one row of the training data.

    Attributes:
        epsilon: Infinite where the run is not private.
        unit: What the guarantee protects, and N.
        private: Whether there is a guarantee at all; ``not_private_because`` says why not.
        verified: Whether clipping was compared with one example at a time before the first step (``self_check``).
        max_examples_per_person: How many rows of the training data one person may have, as was said.
        epsilon_per_person: ε at the same delta for adding or removing all rows of one person.
    """

    epsilon: float
    delta: float
    steps: int
    noise_multiplier: float
    sample_rate: float
    max_grad_norm: float
    expected_batch_size: int
    num_examples: int
    accountant: str
    sampling: str = "poisson"
    neighboring_relation: str = "add_or_remove_one"
    unit: str = UNIT
    private: bool = True
    not_private_because: tuple[str, ...] = ()
    verified: bool = True
    max_examples_per_person: int = 1
    epsilon_per_person: float = math.inf

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which knows no infinity: an infinite ε is None."""
        return {
            name: None if value == math.inf else list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()
        }


class PrivateRun:
    """The steps of one private training.

    Args:
        state: The mechanism.
        accountant: Counts what all runs of this object spent, see :meth:`take_over`.
        ledger: Records every step before its noise exists; None where none was asked for.
        dp_seed: The fixed seed of draws and noise, if there is one: the run is then not private.
        verified: Whether the self-check is switched on.
        max_examples_per_person: How many rows one person may have.
    """

    def __init__(
        self,
        state: PrivacyState,
        accountant: PrivacyAccountant,
        ledger: Ledger | None = None,
        *,
        dp_seed: int | None = None,
        verified: bool = True,
        max_examples_per_person: int = 1,
    ):
        if not isinstance(max_examples_per_person, int) or max_examples_per_person < 1:
            raise ValueError(f"max_examples_per_person must be a whole number of at least 1, got {max_examples_per_person!r}.")
        self.state, self.accountant, self.ledger = state, accountant, ledger
        self.verified, self.max_examples_per_person = verified, max_examples_per_person
        self.steps_left: float = math.inf
        self.unfinished = 0  # draws that were shown and not stepped: epsilon counts them too
        self._counted: Counter[str] = Counter()  # steps of each run, by its id
        self.dp_seed = dp_seed
        self._reasons = [f"dp_seed={dp_seed}: draws and noise can be reproduced"] if dp_seed is not None else []
        if state.noise_multiplier == 0:
            logger.warning("noise_multiplier is 0: NOTHING IS PRIVATE in this run (epsilon is infinite).")

    @property
    def steps(self) -> int:
        """All steps counted, of whatever run of this object."""
        return self._counted.total()

    @property
    def not_private_because(self) -> tuple[str, ...]:
        silent = ["noise_multiplier=0: no noise is added"] if self.state.noise_multiplier == 0 else []
        return tuple(dict.fromkeys([*self._reasons, *silent]))

    def epsilon(self, delta: float) -> float:
        """ε at ``delta`` of every step taken so far, and of a draw that was shown and not stepped."""
        if self.not_private_because:
            return math.inf if self.steps else 0.0
        return self._with_unfinished().epsilon(delta)

    def _with_unfinished(self) -> PrivacyAccountant:
        if not self.unfinished or self.steps_left < 1:
            return self.accountant
        accountant = PrivacyAccountant(self.accountant.accountant)
        for noise_multiplier, sample_rate, steps in self.accountant.history:
            accountant.step(noise_multiplier=noise_multiplier, sample_rate=sample_rate, steps=steps)
        accountant.step(noise_multiplier=self.state.noise_multiplier, sample_rate=self.state.sample_rate, steps=self.unfinished)
        return accountant

    def spent(self, delta: float | None = None) -> PrivacySpent:
        """What was spent at ``delta`` (default: the run's own)."""
        state, delta = self.state, self.state.delta if delta is None else delta
        epsilon, k = self.epsilon(delta), self.max_examples_per_person
        person = epsilon if k == 1 or epsilon in (0, math.inf) else group_epsilon(self._with_unfinished().history, k, delta)
        return PrivacySpent(
            epsilon=epsilon,
            delta=delta,
            steps=self.steps,
            noise_multiplier=state.noise_multiplier,
            sample_rate=state.sample_rate,
            max_grad_norm=state.max_grad_norm,
            expected_batch_size=state.expected_batch_size,
            num_examples=state.num_examples,
            accountant=self.accountant.accountant,
            sampling=state.sampling,
            unit=f"{UNIT} (N = {state.num_examples})",
            private=not self.not_private_because,
            not_private_because=self.not_private_because,
            verified=self.verified,
            max_examples_per_person=k,
            epsilon_per_person=person,
        )

    def spent_in_words(self) -> str:
        """What the target is compared with: ε of one row, or of all rows of one person where a person may have several."""
        k = self.max_examples_per_person
        whose = f" for all rows of one person (max_examples_per_person={k})" if k > 1 else ""
        return f"epsilon{whose} is {self.spent().epsilon_per_person:.4g} after {self.steps} steps"

    # ---- counting ----

    def begin(self) -> None:
        """Record in the ledger that this run starts, or goes on, and as what."""
        if self.ledger is None:
            return
        facts = {"private": not self.not_private_because, "not_private_because": list(self.not_private_because), "verified": self.verified}
        distributed.on_rank_zero(lambda: self.ledger.begin(self.state, facts))

    def take_over(self, state: PrivacyState, at_least: int, *, is_own: bool = False, reasons: Sequence[str] = ()) -> None:
        """Go on with the run of ``state``, and count every step that was ever executed in it and is not counted yet.

        Args:
            at_least: Steps that it is known to have executed.
            is_own: They were all taken, and counted, by this very object; without a ledger nothing else tells.
            reasons: Why they were not private, if they were not.

        Raises:
            PrivacyStateError: the ledger lacks steps.
        """
        counted = self._counted[state.run_id]
        if self.ledger is None:
            executed = counted if is_own else at_least + counted
        else:
            executed, recorded = distributed.on_rank_zero(lambda: self.ledger.read(state.run_id))
            if executed < max(at_least, counted):
                raise PrivacyStateError(
                    f"the ledger '{self.ledger.path}' holds {executed} steps of this run, which has executed {max(at_least, counted)} at least: lines are "
                    "missing, so what was spent is not known. Restore the file from a backup, or make a new DPTrainer or PrivacyEngine and train the "
                    "original model without this checkpoint. If anything of this run is kept, its steps still count."
                )
            reasons = [*reasons, *recorded]
        self.state = state
        self._reasons = list(dict.fromkeys([*self._reasons, *reasons]))
        self._count(executed - counted)

    def plan(self, limit: int) -> None:
        """Set how many more steps the budget allows, ``limit`` at most where there is a target ε."""
        state = self.state
        if state.target_epsilon is None or state.noise_multiplier == 0:
            return
        if self.max_examples_per_person > 1:
            self.steps_left = self._steps_of_groups(limit)
        else:
            self.steps_left = self.accountant.max_steps(
                target_epsilon=state.target_epsilon,
                delta=state.delta,
                noise_multiplier=state.noise_multiplier,
                sample_rate=state.sample_rate,
                limit=limit,
            )

    def _steps_of_groups(self, limit: int) -> int:
        """The most steps after which all rows of one person together are within the target."""
        state, k = self.state, self.max_examples_per_person

        def fits(steps: int) -> bool:
            phases = [*self.accountant.history, (state.noise_multiplier, state.sample_rate, steps)]
            return group_epsilon(phases, k, state.delta) <= state.target_epsilon

        return limit if fits(limit) else bisect.bisect_left(range(1, limit + 1), True, key=lambda steps: not fits(steps))

    def spend_step(self) -> None:
        """Record and count one step. Only after this, and on every rank, may its noise be drawn.

        Raises:
            RuntimeError: the budget is spent; nothing was recorded.
            OSError: the ledger could not be written; the step must not be taken.
        """
        if self.steps_left < 1:
            raise RuntimeError(
                f"the privacy budget is spent: {self.spent_in_words()}, and one more would exceed target_epsilon={self.state.target_epsilon:g}. This step "
                "did not change the model: stop the loop here (in DPTrainer let no callback undo should_training_stop). To train on, start a new run "
                "with a target_epsilon of its own; what both spend adds up."
            )
        if self.ledger is not None and distributed.rank() == 0:
            self.ledger.add_step(self.state.run_id, self._counted[self.state.run_id] + 1)
        self._count(1)  # at once: an interrupt from here on leaves it counted
        self.steps_left -= 1

    def _count(self, steps: int) -> None:
        self._counted[self.state.run_id] += steps
        state = self.state
        self.accountant.step(noise_multiplier=state.noise_multiplier, sample_rate=state.sample_rate, steps=steps)


def saved_state(saved: dict[str, Any]) -> PrivacyState:
    """The state in a dictionary that ``asdict`` made, whatever else lies beside it."""
    return PrivacyState(**{name: saved[name] for name in PrivacyState.__dataclass_fields__})
