"""One private training: its mechanism, the privacy that it has spent and may still spend, and its ledger.

DPTrainer and PrivacyEngine each hold one :class:`PrivateRun`; nothing else counts steps, and nothing is released
without a call of :meth:`PrivateRun.spend_step`.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..mechanism.clipping_functions import AdaptiveClipping, ClippingFunction
from ..mechanism.mechanism import NO_BOUND, Mechanism
from ..mechanism.sampling import steps_per_epoch
from ..mechanism.values import StepParameters
from ..reports.certificate import require_intact
from ..reports.recompute import is_other_data
from ..runtime import distributed
from .checkpoint import PrivacyState
from .ledger import Ledger, PrivacyStateError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PrivacySpent:
    """The privacy that a training has spent so far: (epsilon, delta)-differential privacy for one row of the training
    data, or one person (``unit``), which is added or removed, or changed as ``neighboring_relation`` says.

    Attributes:
        epsilon: Infinite if the run is not private.
        mechanism: The mechanism of every step.
        private: False if there is no guarantee, for the reasons in ``not_private_because``.
        verified: True if clipping was compared with one example at a time before the first step (``self_check``).
        epsilon_per_person: ε at the same delta for all rows of one person.

    Example::

        >>> from dp_transformers import FlatClipping, IndependentNoise, Mechanism, PoissonSampling, PrivacySpent
        >>> mechanism = Mechanism(
        ...     sampling=PoissonSampling(1000, 50), clipping=FlatClipping(1.0), noise=IndependentNoise(2.0)
        ... )
        >>> spent = PrivacySpent(mechanism.epsilon(1e-5), 1e-5, 1, mechanism, "pld")  # as trainer.privacy_spent() does
        >>> spent.unit, spent.sample_rate, spent.noise_multiplier
        ('one row of the training data (N = 1000)', 0.05, 2.0)
    """

    epsilon: float
    delta: float
    steps: int
    mechanism: Mechanism
    accountant: str
    private: bool = True
    not_private_because: tuple[str, ...] = ()
    verified: bool = True
    epsilon_per_person: float = math.inf

    @property
    def noise_multiplier(self) -> float:
        return self.mechanism.noise.noise_multiplier

    @property
    def sample_rate(self) -> float:
        return self.mechanism.sampling.sample_rate

    @property
    def max_grad_norm(self) -> float:
        """The L2 bound on one example's gradient."""
        return self.mechanism.clipping.sensitivity

    @property
    def expected_batch_size(self) -> float:
        return self.mechanism.sampling.expected_batch_size

    @property
    def num_examples(self) -> int:
        return self.mechanism.sampling.num_examples

    @property
    def sampling(self) -> str:
        return self.mechanism.sampling.kind

    @property
    def neighboring_relation(self) -> str:
        return self.mechanism.sampling.relation

    @property
    def unit(self) -> str:
        """The protected unit, and N."""
        return f"{self.mechanism.unit} (N = {self.num_examples})"

    @property
    def max_examples_per_person(self) -> int:
        """The number of rows of the training data that one person may have, as it was declared."""
        return self.mechanism.unit.max_examples_per_person

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON. An infinite ε is None there."""
        values = {name: getattr(self, name) for name in _REPORTED}
        values = {name: None if value == math.inf else value for name, value in values.items()}
        return {**values, "not_private_because": [*self.not_private_because], "mechanism": self.mechanism.to_dict()}


_REPORTED = (
    "epsilon", "delta", "steps", "noise_multiplier", "sample_rate", "max_grad_norm", "expected_batch_size",
    "num_examples", "accountant", "sampling", "neighboring_relation", "unit", "private", "not_private_because",
    "verified", "max_examples_per_person", "epsilon_per_person",
)  # fmt: skip


class PrivateRun:
    """Counts the steps of one private training.

    Args:
        state: The mechanism and the budget.
        accountant: "pld" or "rdp".
        ledger: The record of every step before its noise exists; None for no record.
        dp_seed: A fixed seed of draws and noise. The run is then not private.
        verified: True if the self-check is switched on. It becomes False when a step without it is taken, or resumed
            from.
        about: Returns further facts for the ledger (data, model, software). It is called on rank 0 whenever the run
            begins or goes on.
    """

    def __init__(
        self,
        state: PrivacyState,
        accountant: str = "pld",
        ledger: Ledger | None = None,
        *,
        dp_seed: int | None = None,
        verified: bool = True,
        about: Callable[[], Mapping[str, Any]] = dict,
    ):
        self.state, self.accountant, self.ledger, self.verified = state, accountant, ledger, verified
        self._about = about
        if why := self.mechanism.unsupported(accountant):
            raise ValueError(f"{why} Choose another accountant.")
        self.steps_left: float = math.inf
        self._moved: AdaptiveClipping | None = None  # the clipping function now, if it follows released numbers
        self.unfinished = 0  # draws that the loop got and did not step; epsilon counts them too
        # steps of each run, by its id, for each noise source
        self._segments: dict[str, list[Counter[StepParameters]]] = {}
        self.dp_seed = dp_seed
        self._reasons = [f"dp_seed={dp_seed}: draws and noise can be reproduced"] if dp_seed is not None else []
        if self.mechanism.is_silent:
            logger.warning("noise_multiplier is 0: NOTHING IS PRIVATE in this run (epsilon is infinite).")

    @property
    def mechanism(self) -> Mechanism:
        return self.state.mechanism

    @property
    def steps(self) -> int:
        """All steps that this object has counted, in all of its runs."""
        return sum(map(self._counted, self._segments))

    def _counted(self, run_id: str) -> int:
        return sum(segment.total() for segment in self._segments.get(run_id, ()))

    @property
    def executed(self) -> list[Counter[StepParameters]]:
        """The parameters of all counted steps, in one counter for each time that a run began or went on."""
        return [segment for segments in self._segments.values() for segment in segments if segment]

    @property
    def not_private_because(self) -> tuple[str, ...]:
        silent = ["noise_multiplier=0: no noise is added"] if self.mechanism.is_silent else []
        return tuple(dict.fromkeys([*self._reasons, *silent]))

    def epsilon(self, delta: float) -> float:
        """Return ε at ``delta`` of every step taken so far, and of a draw that the loop got and did not step."""
        if self.not_private_because:
            return math.inf if self.steps else 0.0
        return self.mechanism.epsilon(delta, accountant=self.accountant, executed=self._with_unfinished())

    def epsilon_after(self, steps: int, delta: float | None = None) -> float:
        """Return what ε will be at ``delta`` (default: the delta of the run) after so many more steps."""
        now, self.unfinished = self.unfinished, self.unfinished + steps
        try:
            return self.epsilon(self._target_delta() if delta is None else delta)
        finally:
            self.unfinished = now

    def _with_unfinished(self) -> list[Counter[StepParameters]]:
        if not self.unfinished or self.steps_left < 1:
            return self.executed
        *earlier, last = self._segments.get(self.state.run_id) or [Counter()]
        others = [each for run_id, own in self._segments.items() if run_id != self.state.run_id for each in own]
        shown = Counter({self.mechanism.costliest(self.steps + self.unfinished): self.unfinished})
        return [segment for segment in (*others, *earlier, last + shown) if segment]

    def spent(self, delta: float | None = None) -> PrivacySpent:
        """Return the privacy that was spent at ``delta`` (default: the delta of the run)."""
        delta = self._target_delta() if delta is None else delta
        epsilon, rows = self.epsilon(delta), self.mechanism.unit.max_examples_per_person
        person = epsilon
        if rows > 1 and epsilon not in (0, math.inf):
            person = self.mechanism.epsilon(
                delta, accountant=self.accountant, executed=self._with_unfinished(), rows=rows
            )
        reasons = self.not_private_because or ((NO_BOUND,) if epsilon == math.inf else ())
        return PrivacySpent(
            epsilon=epsilon,
            delta=delta,
            steps=self.steps,
            mechanism=self.mechanism,
            accountant=self.accountant,
            private=not reasons,
            not_private_because=reasons,
            verified=self.verified,
            epsilon_per_person=person,
        )

    def _target_delta(self) -> float:
        if self.state.delta is None:
            raise ValueError("privacy_spent needs a delta: give that of your guarantee (1e-6 is common, below 1/N).")
        return self.state.delta

    def spent_in_words(self) -> str:
        """Say the ε that the target is compared with: of one row, or of all rows of one person."""
        unit = self.mechanism.unit
        k = unit.max_examples_per_person
        rows = (
            f" for all rows of one person (max_examples_per_person={k})" if k > 1 else f" for {unit}" * unit.is_person
        )
        return f"epsilon{rows} is {self.spent().epsilon_per_person:.4g} after {self.steps} steps"

    # ---- the clipping function ----

    def clipping_at(self, step: int) -> ClippingFunction:
        """Return the clipping function of a step, counted from 0: of the last one that was taken, or the next."""
        return self.mechanism.clipping.at(step) if self._moved is None else self._moved

    def move(self, clipping: AdaptiveClipping) -> None:
        """Set the clipping function of the steps that follow."""
        self._moved = clipping

    # ---- counting ----

    def agree(self, **others: Any) -> None:
        """Give all ranks the state of rank 0, with its run id. Their settings must be the same, since they release one
        sum together.

        Args:
            others: Further settings that must be the same, by name.

        Raises:
            ValueError: ranks have different mechanisms, budgets, accountants, checks or seeds.
        """
        own = {"accountant": self.accountant, "dp_seed": self.dp_seed, "self_check": self.verified}
        distributed.require_same({**self.state.settings(), **own, **others})
        self.state = distributed.call_on_rank_zero(lambda: self.state)

    def begin(self) -> None:
        """Record in the ledger that this run starts or goes on with a new noise source."""
        self._segments.setdefault(self.state.run_id, []).append(Counter())
        if (ledger := self.ledger) is not None:
            distributed.call_on_rank_zero(lambda: self._record_beginning(ledger))

    def say_copies(self, counted: Counter[bytes]) -> None:
        """Warn of rows that come more often than epsilon is for. ``counted`` says how often each row comes."""
        mechanism, sampling = self.mechanism, self.mechanism.sampling
        copies = [n for n in counted.values() if n > mechanism.unit.max_examples_per_person]
        if not copies or mechanism.unit.is_person or self.not_private_because:
            return
        most, delta = max(copies), self.state.delta or 0.1 / sampling.num_examples
        steps = mechanism.steps or steps_per_epoch(sampling.num_examples, mechanism.at(0).expected_batch_size)
        planned: Any = {"accountant": self.accountant, "executed": [mechanism.planned(0, steps)]}
        try:
            of_person = mechanism.epsilon(delta, **planned, rows=most)
        except ValueError:  # there is no bound for several rows
            of_person = math.inf
        logger.warning(
            "%d of the %d rows of the training data equal another one, one of them %d times. Epsilon is for one row: "
            "after %d steps it is %.3g (at delta %.2g), and for a person whose %d rows these are it is %.3g. Weigh "
            "losses in the place of copying rows, or give max_examples_per_person=%d.",
            sum(copies), sampling.num_examples, most,
            steps, mechanism.epsilon(delta, **planned), delta,
            most, of_person, most,
        )  # fmt: skip

    def _record_beginning(self, ledger: Ledger) -> None:
        require_intact(ledger)
        if earlier := ledger.other_steps(self.state.run_id):
            logger.warning(
                "%s also holds %d steps of earlier runs, which the epsilon of this training does not count. If this "
                "model starts from theirs, or several models trained on the same data are released, what they spent "
                "adds up. If nothing of those runs was kept, they cost nothing.",
                ledger.path, earlier,
            )  # fmt: skip
        about = self._about()
        now, recorded = about.get("data") or {}, [line.get("data") for line in ledger.beginnings(self.state.run_id)]
        comparable = [data for data in recorded if data and data.get("digest") and data.get("key") == now.get("key")]
        if any(is_other_data(now, data) for data in comparable[-1:]):
            logger.warning(
                "this run goes on with other data than it had before (their digests differ): its epsilon is that of "
                "rows that are in both, and its report names both."
            )
        ledger.begin(self.state.to_dict(), {**about, **self.facts()})

    def facts(self) -> dict[str, Any]:
        """Return the facts that the ledger and checkpoints hold of this run besides its state, for :meth:`resume`."""
        bound = {} if self._moved is None else {"max_grad_norm": self._moved.max_grad_norm}
        return {
            "private": not self.not_private_because,
            "not_private_because": list(self.not_private_because),
            "verified": self.verified,
            **bound,
        }

    def resume(
        self,
        state: PrivacyState,
        at_least: Sequence[Counter[StepParameters]],
        *,
        is_own: bool = False,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Go on with the run of ``state``, and count every step that was ever executed in it and is not counted yet.

        From now on the run takes over the reasons why they were not private, that they were not verified, and the
        largest ``max_examples_per_person``.

        Args:
            at_least: Steps that the run has surely executed, in one counter for each noise source.
            is_own: True if this object took and counted all of them, which matters without a ledger.
            facts: The content of the checkpoint, with its state and :meth:`facts`.

        Raises:
            PrivacyStateError: the ledger lacks steps.
        """
        own, counted = self._segments.setdefault(state.run_id, []), self._counted(state.run_id)
        earlier = [] if facts is None else [facts]
        if self.ledger is not None:
            known = max(sum(segment.total() for segment in at_least), counted)
            recorded, beginnings = distributed.call_on_rank_zero(
                lambda: (self.ledger.segments(state.run_id), self.ledger.beginnings(state.run_id))
            )
            _require_releases(state.mechanism, beginnings)
            executed = sum(segment.total() for segment in recorded)
            if executed < known:
                raise PrivacyStateError(
                    f"the ledger '{self.ledger.path}' holds {executed} steps of this run, which has executed {known} "
                    "at least: lines are missing, so what was spent is not known. Restore the file from a backup, or "
                    "make a new DPTrainer or PrivacyEngine and train the original model without this checkpoint."
                )
            own[:] = [state.mechanism.known(segment, executed) for segment in recorded if segment]
            earlier += beginnings
        elif not is_own:
            own.extend(at_least)
        self.state = _with_rows(state, max([_rows(each) for each in earlier], default=1))
        self._reasons += [why for each in earlier for why in each.get("not_private_because", ())]
        self.verified = self.verified and all(each.get("verified", True) for each in earlier)
        clipping = state.mechanism.clipping
        if facts is not None and "max_grad_norm" in facts and isinstance(clipping, AdaptiveClipping):
            self._moved = replace(clipping, max_grad_norm=facts["max_grad_norm"])

    def plan(self, limit: int, first_step: int = 0) -> None:
        """Set the number of steps from ``first_step`` on that the budget allows. It is at most ``limit`` if there is a
        target ε."""
        state = self.state
        if state.target_epsilon is None or self.mechanism.is_silent:
            return
        self.steps_left = self.mechanism.affordable_steps(
            target_epsilon=state.target_epsilon,
            delta=self._target_delta(),
            limit=limit,
            executed=self.executed,
            first_step=first_step,
            accountant=self.accountant,
        )

    def spend_step(self, step: int) -> StepParameters:
        """Record and count step number ``step`` of the plan, from 0 on. Every rank calls this before its noise is
        drawn.

        Returns:
            The parameters that the step must use.

        Raises:
            RuntimeError: the budget is spent; nothing was recorded.
            OSError: the ledger could not be written; the step must not be taken.
        """
        if self.steps_left < 1:
            raise RuntimeError(
                f"the privacy budget is spent: {self.spent_in_words()}, and one more would exceed "
                f"target_epsilon={self.state.target_epsilon:g}. This step did not change the model: stop the loop "
                "here (in DPTrainer let no callback undo should_training_stop), or start a new run with a "
                "target_epsilon of its own; what both spend adds up."
            )
        parameters = self.mechanism.at(step)._replace(max_grad_norm=self.clipping_at(step).sensitivity)
        segments = self._segments.setdefault(self.state.run_id, [])
        if not segments:
            segments.append(Counter())
        if self.ledger is not None and distributed.rank() == 0:
            self.ledger.add_step(self.state.run_id, self._counted(self.state.run_id) + 1, parameters)
        segments[-1][parameters] += 1  # before anything else, so that an interrupt leaves the step counted
        self.steps_left -= 1
        return parameters


def _require_releases(mechanism: Mechanism, beginnings: Iterable[Mapping[str, Any]]) -> None:
    """Raise PrivacyStateError if the ledger and the mechanism disagree about what steps release besides gradients. The
    lines that began the run are compared, since the line of a step holds the noise of its gradient alone."""
    now = mechanism.to_dict()["releases"]
    for line in beginnings:
        if (before := line["mechanism"]["releases"]) != now:
            raise PrivacyStateError(
                f"the ledger says that this run released {before} besides gradients, and the checkpoint says {now}: "
                "one of the two was changed. Restore it from a backup, or start a new run without this checkpoint."
            )


def _rows(facts: Mapping[str, Any]) -> int:
    """Return the rows of one person by a checkpoint or a line of the ledger."""
    return facts["mechanism"]["unit"]["max_examples_per_person"]


def _with_rows(state: PrivacyState, rows: int) -> PrivacyState:
    """Return the state with at least ``rows`` rows of one person."""
    if rows <= (now := state.mechanism.unit.max_examples_per_person):
        return state
    logger.warning(
        "max_examples_per_person is %d now, but this run was begun with %d, which stays until it ends.",
        now, rows,
    )  # fmt: skip
    return replace(
        state, mechanism=replace(state.mechanism, unit=replace(state.mechanism.unit, max_examples_per_person=rows))
    )
