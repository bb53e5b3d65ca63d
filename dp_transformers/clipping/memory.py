"""What clipping keeps of each weight when it may keep more than its mode does: the gradient of each example, the
factors that it follows from, or nothing.

=========  =====================  ========================================================
kept       bytes                  multiplications, for norm and sum of an example
=========  =====================  ========================================================
instance   4·p·d                  T·p·d to form it, and memory that is written and read
factors    of output gradients    T²·(p + d) or T·p·d for the norm, and T·p·d for the sum
nothing    none                   the same, and those of a second backward pass
=========  =====================  ========================================================

Mode "book_keeping" keeps factors, and instances where these are no larger; the budget is for instances that are larger
and save time. Mode "ghost" keeps nothing; where the budget is enough for all that sums are formed from, that is kept
and there is no second backward pass. Instances of some weights alone would only spare that pass their sums, which is
little for the memory they take.

A plan follows from the shapes of a forward pass, and from what was given for other shapes before (:class:`_Given`),
never from the numbers in a tensor. While a parameter is unknown the mode keeps what it always keeps; the self-check is
where most are met first.

Shape legend: b example, t position, p rows and d columns of the parameter.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from .recorded_call import ForwardPass
from .terms import Convolved, Dense, NormOnly, Outer, Stacked, Term
from .terms.ghost_or_instantiate import is_cheaper_instantiated
from .trainable import TrainableParameters

# Multiplications in the time of writing, or reading, one number of an instance in memory.
TOUCH = 16


@dataclass(frozen=True)
class Plan:
    """What one backward pass keeps.

    Attributes:
        one_pass: Whether all that sums are formed from is kept, so that nobody goes back a second time; else nothing.
        instances: Whether instances are kept of a parameter; of others the term decides.
    """

    budget: MemoryBudget
    one_pass: bool
    instances: Mapping[nn.Parameter, bool] = field(default_factory=dict)

    def note(self, forward: ForwardPass, parameter: nn.Parameter, term: Term, held: Collection[int]) -> None:
        """A call gave this term, and the graph's tensors of that call lie at ``held``."""
        self.budget.note(forward, parameter, term, held)

    def keeps_instance(self, parameter: nn.Parameter, term: Term) -> bool:
        """Whether instances take the place of the term."""
        return self.instances.get(parameter, term.store_instantiated)


@dataclass(frozen=True)
class _Given:
    """What the term of one parameter takes. Factors grow with the numbers that its modules return, instances with the
    number of examples.

    Attributes:
        factor_bytes: Of factors, for each number returned.
        own_bytes: Of those that the graph does not hold.
        largest_instance: Up to how many bytes for each number returned book-keeping keeps instances in their place;
            infinity where it does so wherever norms are computed from them.
        sizes: Positions for each number returned, rows and columns, where instances may take the place of factors.
    """

    factor_bytes: float = 0.0
    own_bytes: float = 0.0
    largest_instance: float = 0.0
    sizes: tuple[float, int, int] | None = None


@dataclass(frozen=True)
class _Choice:
    """For one parameter in one forward pass: the bytes that its factors take while the graph stays, of those that it
    does not hold once it is gone back over, and of its instances, whether book-keeping keeps these, whether that can
    be chosen, and how many multiplications they save."""

    parameter: nn.Parameter
    factors: float
    own: float
    instances: float
    is_instantiated: bool
    is_free: bool
    saved: float

    @property
    def usual(self) -> float:
        return self.instances if self.is_instantiated else self.factors


@dataclass
class MemoryBudget:
    """Plans what to keep within ``limit`` bytes beyond what the mode keeps.

    Raises:
        ValueError: that is no number of bytes.
    """

    limit: float
    _known: dict[nn.Parameter, _Given] = field(default_factory=dict)

    def __post_init__(self) -> None:
        is_number = isinstance(self.limit, int | float) and not isinstance(self.limit, bool)
        if not (is_number and 0 <= self.limit < math.inf):
            raise ValueError(
                f"memory_budget must be a finite number of bytes, at least 0, 'auto' or None; got {self.limit!r}. "
                "2e9 is two gigabytes."
            )

    def refuse(self, mode: str, trainable: TrainableParameters) -> None:
        """Raise ValueError if there is nothing to choose in this mode, or processes could not choose alike."""
        if mode not in ("book_keeping", "ghost"):
            raise ValueError(
                f"memory_budget does not go with clipping mode '{mode}', which says by itself what is kept: take "
                "'auto', 'book_keeping' or 'ghost', or leave memory_budget out."
            )
        if trainable.parallel:
            raise ValueError(
                "memory_budget does not go with tensor parallelism, where every process has parts of other sizes and "
                "all must choose alike: leave memory_budget out."
            )

    def note(self, forward: ForwardPass, parameter: nn.Parameter, term: Term, held: Collection[int]) -> None:
        """Learn the sizes of a term."""
        given = _Given()
        if not isinstance(term, Dense | NormOnly):
            returned, factors = max(1, forward.returned[parameter]), list(_tensors(term))
            own = sum(x.nbytes for x in factors if x.untyped_storage().data_ptr() not in held)
            total = largest = sum(x.nbytes for x in factors) / returned
            sizes: tuple[float, int, int] | None = None
            if isinstance(term, Outer | Convolved):
                positions, rows, columns = term.sizes
                sizes = positions * max(1, forward.batch_size) / returned, rows, columns
                largest *= term.instance_memory if isinstance(term, Outer) else math.inf
            given = _Given(total, own / returned, largest, sizes)
        known = self._known.get(parameter)
        if known is None or forward.uses[parameter] == 1 or given.factor_bytes > known.factor_bytes:
            self._known[parameter] = given

    def limit_of(self, forward: ForwardPass) -> float:
        """The bytes that this pass, over a real batch, may keep."""
        return self.limit

    def plan(self, forward: ForwardPass, *, one_pass: bool, limit: float | None = None) -> Plan:
        """What to keep of the parameters that ``forward`` used, in a mode that goes back once or twice, within
        ``limit`` bytes; None: within the budget."""
        limit = self.limit_of(forward) if limit is None else limit
        used = [p for p, uses in forward.uses.items() if uses]
        if forward.reentrant or any(p not in self._known for p in used):
            return Plan(self, one_pass)
        choices = [self._choice(p, forward) for p in used]
        free = [c for c in choices if c.is_free]
        if one_pass:
            larger = [(c.instances - c.own, c) for c in free if not c.is_instantiated]
            return Plan(self, True, dict.fromkeys(_worthwhile(larger, limit), True))
        left = limit - sum(min(c.instances, c.factors) if c.is_free else c.usual for c in choices)
        if left < 0:
            return Plan(self, False)
        smaller = {c.parameter: c.instances <= c.factors for c in free}
        larger = [(c.instances - c.factors, c) for c in free if not smaller[c.parameter]]
        return Plan(self, True, smaller | dict.fromkeys(_worthwhile(larger, left), True))

    def _choice(self, parameter: nn.Parameter, forward: ForwardPass) -> _Choice:
        given, returned, batch = self._known[parameter], forward.returned[parameter], max(1, forward.batch_size)
        instances = 4.0 * parameter.numel() * batch
        if not given.factor_bytes:
            return _Choice(parameter, math.inf, math.inf, instances, True, False, 0.0)
        own = given.own_bytes * returned
        factors = given.factor_bytes * returned if forward.packs else own
        is_instantiated = instances <= given.largest_instance * returned
        if given.sizes is None or forward.uses[parameter] > 1:
            is_instantiated = is_instantiated and given.sizes is not None
            return _Choice(parameter, factors, own, instances, is_instantiated, False, 0.0)
        per_number, rows, columns = given.sizes
        t, numbers = round(per_number * returned / batch), parameter.numel()
        is_formed = is_cheaper_instantiated(t, rows, columns)
        norm = (t + 2 * TOUCH) * numbers if is_formed else t * t * (rows + columns) * numbers / (rows * columns)
        is_instantiated = is_formed if given.largest_instance == math.inf else is_instantiated
        saved = batch * (norm - 3 * TOUCH * numbers)
        return _Choice(parameter, factors, own, instances, is_instantiated, True, saved)


def _worthwhile(choices: Sequence[tuple[float, _Choice]], limit: float) -> Iterator[nn.Parameter]:
    """The parameters whose instances save time, as far as the bytes go that they take more: those first that save most
    for each byte."""
    for extra, choice in sorted(choices, key=lambda c: c[1].saved / max(c[0], 1.0), reverse=True):
        if choice.saved > 0 and extra <= limit:
            limit -= extra
            yield choice.parameter


def _tensors(term: Term) -> Iterator[torch.Tensor]:
    if isinstance(term, Stacked):
        for block in term.blocks:
            yield from _tensors(block)
    else:
        yield from (x for x in vars(term).values() if isinstance(x, torch.Tensor))
