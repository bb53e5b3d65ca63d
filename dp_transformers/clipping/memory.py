"""The memory budget: chooses for each weight if clipping keeps each example's gradient, its factors, or nothing.

=========  =====================  ========================================================
kept       bytes                  multiplications, for norm and sum of an example
=========  =====================  ========================================================
instance   4·p·d                  T·p·d to form it, and memory that is written and read
factors    of output gradients    T²·(p + d) or T·p·d for the norm, and T·p·d for the sum
nothing    none                   those of factors, and of a second backward pass
=========  =====================  ========================================================

Mode "book_keeping" keeps factors, and instances if they are no larger; the budget pays for larger instances that save
time. Mode "ghost" keeps nothing. If the budget is enough to keep the factors or instances of all weights, it keeps
them, and needs no second backward pass. It never keeps those of some weights only, which would save little.

A plan depends on the shapes of a forward pass and on the sizes of earlier terms (:class:`_TermSize`), never on the
numbers in a tensor. As long as a parameter is unknown, the mode keeps what it always keeps. Most parameters become
known in the self-check.

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
from .terms.arithmetic import is_cheaper_instantiated
from .trainable import TrainableParameters

# Multiplications in the time of reading or writing one number of an instance in memory.
TOUCH = 16


@dataclass(frozen=True)
class Plan:
    """The choice for one backward pass.

    Attributes:
        one_pass: True if everything that sums are formed from is kept, so that there is no second pass; else nothing.
        instances: True for parameters with kept instances, False for kept factors; for others the term decides.
    """

    budget: MemoryBudget
    one_pass: bool
    instances: Mapping[nn.Parameter, bool] = field(default_factory=dict)

    def keeps_instance(self, parameter: nn.Parameter, term: Term) -> bool:
        """Return True if instances are kept instead of the term."""
        return self.instances.get(parameter, term.store_instantiated)


@dataclass(frozen=True)
class _TermSize:
    """The size of the terms of one parameter. Factors grow with the numbers that its modules return, instances with
    the number of examples.

    Attributes:
        factor_bytes: Bytes of factors, for each number returned.
        own_bytes: Bytes of factors that the graph does not hold, for each number returned.
        largest_instance: Largest size (bytes for each number returned) of instances that book-keeping keeps instead;
            infinite if it keeps them wherever norms are computed from them.
        sizes: Positions for each number returned, rows and columns, if instances may replace factors.
    """

    factor_bytes: float = 0.0
    own_bytes: float = 0.0
    largest_instance: float = 0.0
    sizes: tuple[float, int, int] | None = None


@dataclass(frozen=True)
class _Choice:
    """The choice for one parameter in one forward pass.

    Attributes:
        factors: Bytes of its factors while the graph exists.
        own: Bytes of the factors that the graph does not hold.
        instances: Bytes of its instances.
        is_instantiated: True if book-keeping keeps instances.
        is_free: True if there is a choice.
        saved: Multiplications that instances save.
    """

    parameter: nn.Parameter
    factors: float
    own: float
    instances: float
    is_instantiated: bool
    is_free: bool
    saved: float


@dataclass
class MemoryBudget:
    """Plans what to keep within ``limit`` bytes beyond what the mode keeps.

    Raises:
        ValueError: ``limit`` is not a number of bytes.
    """

    limit: float
    _known: dict[nn.Parameter, _TermSize] = field(default_factory=dict)

    def __post_init__(self) -> None:
        is_number = isinstance(self.limit, int | float) and not isinstance(self.limit, bool)
        if not (is_number and 0 <= self.limit < math.inf):
            raise ValueError(
                f"memory_budget must be a finite number of bytes, at least 0, 'auto' or None; got {self.limit!r}. "
                "2e9 is two gigabytes."
            )

    def refuse(self, mode: str, trainable: TrainableParameters) -> None:
        """Raise ValueError if the mode leaves no choice, or processes could choose differently."""
        if mode not in ("book_keeping", "ghost"):
            raise ValueError(
                f"memory_budget does not go with clipping mode '{mode}', which leaves no choice: take 'auto', "
                "'book_keeping' or 'ghost', or leave memory_budget out."
            )
        if trainable.parallel:
            raise ValueError(
                "memory_budget does not go with tensor parallelism, where processes have parts of different sizes and "
                "could choose differently: leave memory_budget out."
            )

    def record(self, forward: ForwardPass, parameter: nn.Parameter, term: Term, held: Collection[int]) -> None:
        """Record the sizes of a term. ``held`` are the addresses of the tensors that the graph saved for its call."""
        found = _TermSize()
        if not isinstance(term, Dense | NormOnly):
            returned, factors = max(1, forward.returned[parameter]), list(_tensors(term))
            own = sum(x.nbytes for x in factors if x.untyped_storage().data_ptr() not in held)
            total = largest = sum(x.nbytes for x in factors) / returned
            sizes: tuple[float, int, int] | None = None
            if isinstance(term, Outer | Convolved):
                positions, rows, columns = term.sizes
                sizes = positions * max(1, forward.batch_size) / returned, rows, columns
                largest *= term.instance_memory if isinstance(term, Outer) else math.inf
            found = _TermSize(total, own / returned, largest, sizes)
        known = self._known.get(parameter)
        if known is None or forward.uses[parameter] == 1 or found.factor_bytes > known.factor_bytes:
            self._known[parameter] = found

    def limit_of(self, forward: ForwardPass) -> float:
        """Return the bytes that this pass, over a real batch, may keep."""
        return self.limit

    def plan(self, forward: ForwardPass, *, one_pass: bool, limit: float | None = None) -> Plan:
        """Choose what to keep for the parameters that ``forward`` used, within ``limit`` bytes (default: the budget).
        ``one_pass`` is that of the mode."""
        limit = self.limit_of(forward) if limit is None else limit
        used = [p for p, uses in forward.uses.items() if uses]
        if forward.reentrant or any(p not in self._known for p in used):
            return Plan(self, one_pass)
        choices = [self._choice(p, forward) for p in used]
        free = [c for c in choices if c.is_free]
        if one_pass:
            larger = [(c.instances - c.own, c) for c in free if not c.is_instantiated]
            return Plan(self, True, dict.fromkeys(_worthwhile(larger, limit), True))
        kept = (c.instances if c.is_instantiated else c.factors for c in choices if not c.is_free)
        left = limit - sum(kept) - sum(min(c.instances, c.factors) for c in free)
        if left < 0:
            return Plan(self, False)
        smaller = {c.parameter: c.instances <= c.factors for c in free}
        larger = [(c.instances - c.factors, c) for c in free if not smaller[c.parameter]]
        return Plan(self, True, smaller | dict.fromkeys(_worthwhile(larger, left), True))

    def _choice(self, parameter: nn.Parameter, forward: ForwardPass) -> _Choice:
        known, returned, batch = self._known[parameter], forward.returned[parameter], max(1, forward.batch_size)
        instances = 4.0 * parameter.numel() * batch
        if not known.factor_bytes:
            return _Choice(parameter, math.inf, math.inf, instances, True, False, 0.0)
        own = known.own_bytes * returned
        factors = known.factor_bytes * returned if forward.packs else own
        is_instantiated = instances <= known.largest_instance * returned
        if known.sizes is None or forward.uses[parameter] > 1:
            is_instantiated = is_instantiated and known.sizes is not None
            return _Choice(parameter, factors, own, instances, is_instantiated, False, 0.0)
        per_number, rows, columns = known.sizes
        t, numbers = round(per_number * returned / batch), parameter.numel()
        is_formed = is_cheaper_instantiated(t, rows, columns)
        norm = (t + 2 * TOUCH) * numbers if is_formed else t * t * (rows + columns) * numbers / (rows * columns)
        is_instantiated = is_formed if known.largest_instance == math.inf else is_instantiated
        saved = batch * (norm - 3 * TOUCH * numbers)
        return _Choice(parameter, factors, own, instances, is_instantiated, True, saved)


def _worthwhile(choices: Sequence[tuple[float, _Choice]], limit: float) -> Iterator[nn.Parameter]:
    """Yield the parameters with instances that save time, the largest saving for each extra byte first, as long as the
    extra bytes stay within ``limit``."""
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
