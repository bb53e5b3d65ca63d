"""Units: the rows of a batch that are clipped together, as one example, because they belong to one person or document.

The gradient of a unit is the sum of its rows' gradients. Its ghost norm has the formula of an example's, over the
positions of all its rows, and its instance is the sum of its rows' instances. So the terms of rows are regrouped into
terms of units (:class:`.terms.arithmetic.Regrouping`) to be measured. Clipped sums need no regrouping, since every row
has the coefficient of its unit.

Shape legend: b row, u unit, r row of a unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch

from .norms import FP32, SPLIT, DirectNorm, NormAccumulator
from .terms import Term
from .terms.arithmetic import Regrouping
from .terms.tied_weights import norm_of_sum, position_norms


class Units:
    """The units of a batch.

    Args:
        unit_ids: (B,) integers, the same for the rows of one unit.
        rows: (B,), on the device of the batch.

    Attributes:
        ids: (U,), the distinct ids in ascending order.
        of_row: (B,), the index of each row's unit in ``ids``.

    Raises:
        ValueError: ``unit_ids`` is not one integer for each row.
    """

    def __init__(self, unit_ids: torch.Tensor, rows: torch.Tensor):
        unit_ids = torch.as_tensor(unit_ids)
        if unit_ids.shape != rows.shape or unit_ids.is_floating_point():
            raise ValueError(
                f"unit_ids are {unit_ids.dtype} of shape {tuple(unit_ids.shape)}, and the batch has "
                f"{len(rows)} rows: give one integer for each row, the same for all rows of a unit."
            )
        unit_ids = unit_ids.to(rows.device)
        self.ids, self.of_row, self._sizes = unit_ids.unique(return_inverse=True, return_counts=True)
        self._rows = self.of_row.argsort(stable=True)  # the rows of the first unit, then of the second, ...
        self._classes = list(self._by_size())

    @property
    def are_rows(self) -> bool:
        """True if every unit has one row."""
        return len(self.ids) == len(self.of_row)

    def in_order(self, x_b: torch.Tensor) -> torch.Tensor:
        """Bring one number for each row into the order of ``ids``, where every unit has one row."""
        return x_b[self._rows]

    def _by_size(self) -> Iterator[tuple[torch.Tensor, Regrouping]]:
        """Yield the indices of units of about one size, and their rows. Sizes are rounded up to powers of two, so that
        less than half of what is computed is padding."""
        first, exponent_of = self._sizes.cumsum(0) - self._sizes, torch.frexp((self._sizes - 1).float()).exponent
        for exponent in exponent_of.unique().tolist():  # of the next power of two
            units = (exponent_of == exponent).nonzero().squeeze(1)
            offset = torch.arange(2**exponent, device=units.device)
            rows_ur = self._rows[(first[units, None] + offset).clamp(max=len(self._rows) - 1)]
            yield units, Regrouping(rows_ur, offset >= self._sizes[units, None])

    def zeros(self) -> torch.Tensor:
        """Return (U,) zeros."""
        return torch.zeros(len(self.ids), dtype=torch.float32, device=self.of_row.device)

    def add_norms(self, norms: NormAccumulator, terms: Sequence[Term], *, instantiate: bool = False) -> None:
        """Add the (U,) norms of the sum of ``terms``, all uses of one parameter, with allowances for rounding."""
        if len(self._classes) == 1:
            _add(norms, terms, self._classes[0][1], instantiate=instantiate)
            return
        norm_sq_u = self.zeros()
        for units, regrouping in self._classes:
            _add(own := NormAccumulator(), terms, regrouping, instantiate=instantiate)
            norm_sq_u[units] = cast(torch.Tensor, own.total(norm_sq_u.device))  # a norm was added
        norms.add(DirectNorm(norm_sq_u.sqrt_()))


def _add(norms: NormAccumulator, terms: Sequence[Term], regrouping: Regrouping, *, instantiate: bool) -> None:
    """Add the norms of units of one size."""
    of_units = [term.regrouped(regrouping) for term in terms]
    rounding = SPLIT if any(term.is_bf16 for term in of_units) else FP32
    measured = norm_of_sum(of_units, instantiate=instantiate, cache=regrouping.cache)
    norms.add(measured, position_norms(of_units, regrouping.cache), rounding)
