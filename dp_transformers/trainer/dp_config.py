"""DPTrainingArguments adds the privacy parameters to TrainingArguments, and refuses what would break the
guarantee."""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from transformers import Seq2SeqTrainingArguments, TrainingArguments

from ..clipping.measured_budget import memory_budget_of
from ..clipping.modes import MODES
from ..mechanism.accounting.accountants import check_accountant
from ..mechanism.clipping_functions import clipping_of
from ..mechanism.mechanism import Mechanism, PrivacyUnit, Release
from ..mechanism.noise import IndependentNoise
from ..mechanism.sampling import PoissonSampling
from ..step.releases import LOSS, loss_release
from .refused import refuse_arguments, refuse_other_trainers

T = TypeVar("T")

_POSITIVE = {
    "target_epsilon": "target_epsilon must be a positive finite number, got {}.",
    "loss_bound": "loss_bound must be a positive finite number, got {}; to log no private loss set "
    "log_raw_metrics=True.",
    "loss_noise_factor": "loss_noise_factor must be a positive finite number, got {}; to log no private loss set "
    "log_raw_metrics=True.",
}


def _explained(cls: type[T]) -> type[T]:
    """Let a command line say of each field what the docstring of its class says."""
    for name, text in re.findall(r"^ {8}(\w+) \(.*\):\n((?: {12}.*\n)+)", cls.__doc__ or "", re.M):
        plain = re.sub(r"\[`~?(?:\w+\.)*(\w+)`\]", r"\1", " ".join(text.split())).replace("`", "")
        vars(cls)["__dataclass_fields__"][name].metadata = {"help": plain.replace("%", "%%")}
    return cls


@_explained
@dataclass
class DPTrainingArguments(TrainingArguments):
    """Arguments of [`DPTrainer`]: everything [`~transformers.TrainingArguments`] has, and the privacy parameters
    below.

    `per_device_train_batch_size` is the *physical* batch size, what fits the device; it has no influence on the
    result. `gradient_accumulation_steps` only helps to derive `expected_batch_size` and is 1 afterwards.

    > Parameters that control the privacy

        target_epsilon (`float`, *optional*):
            The privacy budget ε of the whole training. The noise is calibrated to it, unless `noise_multiplier` is
            given as well, and training stops before the step that would exceed it. With both and
            `num_train_epochs=math.inf` it takes all the steps that the budget allows.
        target_delta (`float`):
            The δ of (ε, δ)-differential privacy: a probability, which must be given and smaller than 1/N for N
            training examples; 1e-6 is common.
        noise_multiplier (`float`, *optional*):
            The standard deviation σ of the noise on the sum of clipped gradients, in units of `max_grad_norm`, to
            choose the noise yourself; 0 trains without privacy.
        expected_batch_size (`int`, *optional*):
            The number of examples (or persons, by `privacy_unit_column`) that a step takes on average, over all
            processes. Defaults to `per_device_train_batch_size` × `gradient_accumulation_steps` × number of processes.
        max_grad_norm (`float`, defaults to 1.0):
            The clipping bound C of one example's gradient (L2 norm). The noise is proportional to it.
        max_examples_per_person (`int`, defaults to 1):
            The number of rows of the training data that one person may have. ε protects one row; with more,
            `target_epsilon` is met for all rows of one person together, and both numbers are reported.
        privacy_unit_column (`str`, *optional*):
            The column of the training data that names the owner of a row. ε then protects a person: a step draws
            persons, takes at most `rows_per_unit` rows of each, and clips the mean of their gradients. With
            `max_examples_per_person` above 1 a step draws rows, and of each person that many are kept at most.
        rows_per_unit (`int`, *optional*):
            The number of rows of a drawn person that take part in a step at most, chosen at random each time. Defaults
            to 4.
        augmentation_multiplicity (`int`, defaults to 1):
            The number of times K that each drawn row is loaded, under random numbers of its own: the mean of the K
            gradients is clipped (De et al., 2022). It costs K times the time, and nothing in ε.
        clipping (`str`, defaults to `"flat"`):
            What an example's gradient is multiplied with: `"flat"` bounds long gradients, `"auto_s"` and
            `"normalised"` make all nearly equally long, `"dp_psac"` all but the shortest.
        clipping_mode (`str`, defaults to `"auto"`):
            How the gradients of examples are clipped: `"auto"`, `"book_keeping"`, `"ghost"`, `"fast_gradient"` or
            `"per_sample"`. All give the same result, and differ in time and memory; `"auto"` suits most models.
        memory_budget (`float` or `"auto"`, *optional*):
            How many bytes of each device a backward pass may keep beyond what the clipping mode (`"auto"`,
            `"book_keeping"` or `"ghost"`) keeps, to save time; `"auto"` is what devices have to spare.
        fill_physical_batches (`bool`, defaults to `False`):
            Whether every physical batch has exactly `per_device_train_batch_size` rows. Rows that are missing are
            copies of others, with weight 0; they change no result and cost time.
        accountant (`str`, defaults to `"pld"`):
            How ε is computed from the steps: `"pld"` gives the tightest value, `"rdp"` an upper bound that is mostly
            larger. An [`~dp_transformers.mechanism.accounting.Accountant`] of your own is taken, too.
        sampling (`str`, defaults to `"poisson"`):
            How a step chooses its examples. The only choice is `"poisson"`, which ε is computed for.
        mechanism ([`~dp_transformers.mechanism.mechanism.Mechanism`], `dict` or `str`, *optional*):
            Sampling, clipping, noise and what else ε depends on, in the place of the arguments that say so otherwise;
            also as the dictionary of its `to_dict()`, as JSON text, or as the path of a JSON file.
        secure_rng (`bool`, defaults to `False`):
            Whether draws and noise come from a cryptographic generator, which needs the extra `secure` of this package
            (`pip install 'dp-finetune[secure]'`).
        dp_seed (`int`, *optional*):
            A fixed seed of draws and noise, for tests only: whoever knows it knows the noise, so nothing is private.
        self_check (`bool`, defaults to `True`):
            Whether clipping is compared with the gradients of one example at a time, on rows of the first batch and of
            others that are new. The run is reported as not verified otherwise.
        data_digest (`bool`, defaults to `True`):
            Write a keyed digest of the training data into `privacy.json`. Every row is read for it.
        loss_bound (`float`, *optional*):
            The `loss` that is logged is private: each example's is clipped to [0, `loss_bound`], and their mean gets
            noise of its own, which ε covers. Defaults to 4 + ln K for a head with K classes or tokens, else to 10.
        loss_noise_factor (`float`, defaults to 10.0):
            The noise multiplier of the logged loss, over that of the gradients. At 10 the gradients take 0.5% more
            noise for the same ε.
        without_privacy (`bool`, defaults to `False`):
            Train the twin for comparison: the same draws and steps, without noise and without clipping. NOTHING IS
            PRIVATE then, and the true loss is logged.
        log_raw_metrics (`bool`, defaults to `False`):
            Whether the loss of training batches is shown without noise, and not covered by ε, on the console alone
            (`raw_loss`). No private loss is released then, and nothing is spent on it.
        logging_steps (`float`, defaults to 10):
            The number of steps between two lines of the log; a number below 1 is a share of all steps.

    Example::

        >>> from dp_transformers import DPTrainingArguments
        >>> args = DPTrainingArguments(
        ...     "outputs", target_epsilon=8.0, target_delta=1e-6, max_grad_norm=1.0, expected_batch_size=1024
        ... )
        >>> args.expected_batch_size, args.gradient_accumulation_steps
        (1024, 1)
    """

    target_epsilon: float | None = None
    target_delta: float | None = None
    noise_multiplier: float | None = None
    expected_batch_size: int | None = None
    max_grad_norm: float = 1.0
    max_examples_per_person: int = 1
    privacy_unit_column: str | None = None
    rows_per_unit: int | None = None
    augmentation_multiplicity: int = 1
    clipping: str = "flat"
    clipping_mode: str = "auto"
    memory_budget: float | str | None = None
    fill_physical_batches: bool = False
    accountant: str = "pld"
    sampling: str = "poisson"
    # A Mechanism when the arguments are made. HfArgumentParser reads the second of several types, so a str.
    mechanism: Mechanism | str | dict[str, Any] | None = None
    secure_rng: bool = False
    dp_seed: int | None = None
    self_check: bool = True
    data_digest: bool = True
    loss_bound: float | None = None
    loss_noise_factor: float = 10.0
    without_privacy: bool = False
    log_raw_metrics: bool = False
    logging_steps: float = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        self._take_mechanism()
        self._check_privacy()
        refuse_arguments(self)
        self.expected_batch_size_is_derived = self.expected_batch_size is None
        if self.expected_batch_size is None:
            self.expected_batch_size = (
                self.per_device_train_batch_size * self.gradient_accumulation_steps * self.world_size
            )
        self.gradient_accumulation_steps = 1

    @property
    def train_batch_size(self) -> int:
        """Return the physical batch size, which every Trainer reads when it is made.

        Raises:
            ValueError: the Trainer that reads it is no DPTrainer, so it would train without privacy.
        """
        refuse_other_trainers(sys._getframe(1).f_locals.get("self"))
        return super().train_batch_size

    @property
    def privacy_unit(self) -> PrivacyUnit:
        """The unit that the arguments describe."""
        return PrivacyUnit.of(self.max_examples_per_person, self.privacy_unit_column, self.rows_per_unit)

    def _take_mechanism(self) -> None:
        """Set the fields that describe a mechanism to what ``mechanism`` says, if it is given."""
        if self.mechanism is None:
            return
        self.mechanism = mechanism = _read_mechanism(self.mechanism)
        step, release = mechanism.at(0), loss_release(mechanism)
        if release is not None and self.log_raw_metrics:
            raise ValueError(
                "log_raw_metrics=True is given beside a mechanism that releases the loss with noise: leave one out."
            )
        said = {
            "noise_multiplier": None,
            "expected_batch_size": step.expected_batch_size,
            "max_grad_norm": step.max_grad_norm,
            "clipping": mechanism.clipping.kind,
            "max_examples_per_person": mechanism.unit.max_examples_per_person,
            "privacy_unit_column": mechanism.unit.column,
            "rows_per_unit": mechanism.unit.rows_per_step,
            "sampling": mechanism.sampling.kind,
            "loss_bound": None if release is None else release.center + release.bound,
            "loss_noise_factor": 10.0,
            "max_steps": mechanism.steps or self.max_steps,
        }
        for name, value in said.items():
            if getattr(self, name) not in (type(self).__dataclass_fields__[name].default, value):
                given = f"{name}={getattr(self, name)!r} is given beside a mechanism, which says what it is"
                raise ValueError(f"{given}: leave {name} out, or the mechanism.")
            setattr(self, name, value)

    def mechanism_for(
        self, num_examples: int, steps: int, saved: Mechanism | None = None, *, loss_bound: float | None = None
    ) -> Mechanism:
        """Return the mechanism of ``steps`` steps on so many examples: ``mechanism``, or one that is built from the
        other fields.

        Args:
            saved: The mechanism of a run that is resumed. It says what the fields leave open, and whether the loss is
                released.
            loss_bound: The field's default for the model that is trained. Without either no loss is released.

        Raises:
            ValueError: the mechanism is for another number of examples, or no noise meets the target.
        """
        if isinstance(self.mechanism, Mechanism):
            if self.mechanism.sampling.num_examples != num_examples:
                of_mechanism = f"the mechanism is for num_examples={self.mechanism.sampling.num_examples}"
                raise ValueError(f"{of_mechanism}, but train_dataset has {num_examples}: build it for this data set.")
            return self.mechanism.without_privacy() if self.without_privacy else self.mechanism
        expected, sigma = self.expected_batch_size, self.noise_multiplier
        if saved is not None:
            expected = saved.at(0).expected_batch_size if self.expected_batch_size_is_derived else expected
            sigma = saved.at(0).noise_multiplier if sigma is None else sigma
        assert expected is not None and self.target_delta is not None, "__post_init__ derives one, refuses the other"
        begins_at = 1.0 if sigma is None else sigma
        mechanism = Mechanism(
            sampling=PoissonSampling(num_examples, expected),
            clipping=clipping_of(self.clipping, self.max_grad_norm, begins_at),
            noise=IndependentNoise(begins_at),
            steps=steps,
            releases=self._releases(begins_at, loss_bound, saved),
            unit=self.privacy_unit,
        )
        if self.without_privacy:
            return mechanism.without_privacy()
        if sigma is not None:
            return mechanism
        assert self.target_epsilon is not None, "__post_init__ refuses arguments with neither of the two"
        return mechanism.calibrated(
            target_epsilon=self.target_epsilon, target_delta=self.target_delta, accountant=self.accountant
        )

    def steps_until_spent(self, num_examples: int, *, loss_bound: float | None = None) -> int:
        """Return how many steps on so many examples stay within `target_epsilon`, with noise that is given.

        Raises:
            ValueError: there is no target or no noise, or the target has room for no step.
        """
        target, delta = self.target_epsilon, self.target_delta
        if target is None or delta is None or self.mechanism is self.noise_multiplier is None:
            raise ValueError(
                "num_train_epochs=inf trains until the budget is spent: give target_epsilon and noise_multiplier, or "
                "a number of epochs."
            )
        private = copy(self)
        private.without_privacy = False  # its twin takes as many steps
        mechanism = private.mechanism_for(num_examples, 1, loss_bound=loss_bound).until_spent(
            target_epsilon=target, target_delta=delta, accountant=self.accountant
        )
        return cast(int, mechanism.steps)

    def _releases(self, sigma: float, loss_bound: float | None, saved: Mechanism | None) -> tuple[Release, ...]:
        """Return the release of the loss, or none: for a run that was begun without it, or has no noise."""
        bound = loss_bound if self.loss_bound is None else self.loss_bound
        begun_without = saved is not None and not saved.releases and self.loss_bound is None
        if bound is None or sigma == 0 or self.log_raw_metrics or begun_without:
            return ()
        return (Release.within(LOSS, 0.0, bound, noise_multiplier=self.loss_noise_factor * sigma),)

    def to_dict(self) -> dict[str, Any]:
        return {
            **super().to_dict(),
            "mechanism": self.mechanism.to_dict() if isinstance(self.mechanism, Mechanism) else self.mechanism,
        }

    def _check_privacy(self) -> None:
        numbers = ("target_epsilon", "noise_multiplier", "max_grad_norm", "expected_batch_size")
        for name in (*numbers, "loss_bound", "loss_noise_factor"):
            optional = name not in ("max_grad_norm", "loss_noise_factor")
            if not isinstance(value := getattr(self, name), (int, float, *([type(None)] if optional else []))):
                raise ValueError(f"{name} must be an int or a float, got {value!r} ({type(value).__name__}).")
        if not isinstance(self.target_delta, (int, float)) or not 0 < self.target_delta < 1:
            raise ValueError(
                "target_delta must be given, between 0 and 1 and smaller than 1/N for N training examples; "
                f"got {self.target_delta!r}. It is never chosen for you: it is the probability with which the "
                "guarantee may fail (1e-6 is common). For evaluation alone use Trainer with TrainingArguments."
            )
        if self.mechanism is self.target_epsilon is self.noise_multiplier is None:
            raise ValueError(
                "give target_epsilon (the noise is calibrated to it), noise_multiplier (epsilon follows), or both "
                "(training stops before a step that would exceed the target); got neither."
            )
        if self.noise_multiplier is not None and not 0 <= self.noise_multiplier < math.inf:
            raise ValueError(f"noise_multiplier must be a finite number, at least 0, got {self.noise_multiplier}.")
        for name, what in _POSITIVE.items():
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise ValueError(what.format(value))
        for name in ("expected_batch_size", "per_device_train_batch_size", "augmentation_multiplicity"):
            if (size := getattr(self, name)) is not None and size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}.")
        assert self.privacy_unit is not None  # made to refuse what is no number of rows
        if self.mechanism is None:
            clipping_of(
                self.clipping, self.max_grad_norm, 1.0 if self.noise_multiplier is None else self.noise_multiplier
            )
        if self.clipping_mode not in ("auto", *MODES):
            raise ValueError(
                f"clipping_mode {self.clipping_mode!r} is unknown; choose 'auto' or one of {sorted(MODES)}."
            )
        if isinstance(self.memory_budget, str):  # of a command line
            with contextlib.suppress(ValueError):
                self.memory_budget = float(self.memory_budget)
        memory_budget_of(self.memory_budget)
        self.accountant = check_accountant(self.accountant)
        if self.mechanism is None and self.sampling != PoissonSampling.kind:
            raise ValueError(
                f"sampling {self.sampling!r} is not known to the arguments, which have 'poisson' alone: give another "
                "one by mechanism=. In the place of batches that are shuffled in every epoch, for which Poisson's "
                "epsilon is too small, take RandomAllocationSampling; of b-min-sep nothing but Monte-Carlo estimates "
                "is known, which are no bound, so take CyclicPoissonSampling."
            )
        if self.secure_rng and self.dp_seed is not None:
            raise ValueError("secure_rng=True and dp_seed contradict each other: drop one of them.")


@dataclass
class DPSeq2SeqTrainingArguments(DPTrainingArguments, Seq2SeqTrainingArguments):
    """Arguments of [`DPSeq2SeqTrainer`]: everything [`~transformers.Seq2SeqTrainingArguments`] has, and the privacy
    parameters of [`DPTrainingArguments`].

    Example::

        >>> from dp_transformers import DPSeq2SeqTrainingArguments
        >>> args = DPSeq2SeqTrainingArguments(
        ...     "outputs", target_epsilon=8.0, target_delta=1e-6, predict_with_generate=True
        ... )
        >>> args.predict_with_generate, args.max_grad_norm
        (True, 1.0)
    """


def _read_mechanism(given: Mechanism | str | Mapping[str, Any]) -> Mechanism:
    """Return the mechanism that a dictionary, its JSON text or the file with that text describes."""
    if isinstance(given, str):
        given = json.loads(given if given.startswith("{") else Path(given).read_text())
    if isinstance(given, Mapping):
        given = Mechanism.from_dict(given)
    if not isinstance(given, Mechanism):
        raise ValueError(
            "mechanism must be a Mechanism, the dictionary of its to_dict() or the path of a JSON file, got "
            f"{given!r}."
        )
    return given
