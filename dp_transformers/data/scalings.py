"""What a training loop multiplies the rows of a batch with, and adds to them: it must not follow the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

POSITIONS = 16  # of each row at which batches are compared
FEWEST_VALUES = 4  # so many different numbers at a position do not lie on a line by accident
_ROWS = 32  # in which different numbers are counted
_SINGLE = torch.finfo(torch.float32).eps


class _Lines(NamedTuple):
    """At each of K positions the line through the numbers before (x) and after (y) of all rows of a batch.

    Attributes:
        x_mean_k, y_mean_k: A point of it. NaN where few of the numbers are different.
        slope_k: NaN where the numbers lie on no line, as are ``spread_k`` and ``error_k``.
        spread_k: The standard deviation of x.
        error_k: By how much rounding may change y.
    """

    x_mean_k: np.ndarray
    y_mean_k: np.ndarray
    slope_k: np.ndarray
    spread_k: np.ndarray
    error_k: np.ndarray

    @classmethod
    def through(cls, x_bk: np.ndarray, y_bk: np.ndarray, eps: float) -> _Lines:
        """``eps`` is the precision of y."""
        x_max_k, y_max_k = np.abs(x_bk).max(0), np.abs(y_bk).max(0)
        varies_k = np.isfinite(x_max_k + y_max_k) & (np.minimum(_values(x_bk), _values(y_bk)) >= FEWEST_VALUES)
        x_mean_k, y_mean_k = np.where(varies_k, [x_bk.mean(0), y_bk.mean(0)], np.nan)
        x0_bk = x_bk - x_mean_k
        spread_k = np.sqrt((x0_bk**2).mean(0))
        slope_k = (x0_bk * (y_bk - y_mean_k)).mean(0) / spread_k**2
        error_k = (8 * _SINGLE + eps) * (np.abs(slope_k) * x_max_k + y_max_k)
        is_line_k = (np.abs(y_mean_k + slope_k * x0_bk - y_bk) <= error_k).all(0)
        return cls(x_mean_k, y_mean_k, *np.where(is_line_k, [slope_k, spread_k, error_k], np.nan))

    @property
    def varies_k(self) -> np.ndarray:
        return ~np.isnan(self.x_mean_k)

    @property
    def is_line_k(self) -> np.ndarray:
        return ~np.isnan(self.slope_k)

    def is_missed_k(self, x_bk: np.ndarray, y_bk: np.ndarray, error_k: np.ndarray) -> np.ndarray:
        """(K,) bool, where numbers of another batch are further from these lines than rounding explains."""
        x0_bk = x_bk - self.x_mean_k
        allowed_bk = self.error_k * (1 + np.abs(x0_bk) / self.spread_k) + error_k
        return np.any(np.abs(self.y_mean_k + self.slope_k * x0_bk - y_bk) > allowed_bk, axis=0)

    def completed(self, others: _Lines) -> _Lines:
        """These, and ``others`` where there is none."""
        return _Lines(*np.where(self.is_line_k, self, others))


_UNKNOWN = _Lines(*np.full((5, POSITIONS), np.nan))
_UNCHANGED = _Lines(*np.repeat([[0.0], [0.0], [1.0], [np.inf], [0.0]], POSITIONS, 1))


@dataclass
class _Known:
    """Of one column. ``alike`` counts the batches whose rows were all changed alike, less those where they were
    not."""

    lines: _Lines
    alike: int = 0


class Scalings:
    """By which factors, and with what added, the rows of loaded columns become what the model is called with.

    Where these numbers are the same for all rows of a batch, at one position, they must be so for all batches: if they
    are not, they follow the batch (its largest number, its mean), and one example changes all rows. Functions of each
    row by itself may be the same for the few rows of a batch by chance, so that they must be the rule.

    Args:
        has_drawn: Whether a global random generator was drawn from since the batch was handed out. Such a batch may
            have been augmented as a whole, and is not compared.
    """

    def __init__(self, has_drawn: Callable[[], bool]):
        self._has_drawn, self._known = has_drawn, dict[Any, _Known]()

    def require_same(
        self, kind: Any, loaded_bk: torch.Tensor, made_bk: torch.Tensor | None, eps: float, who: str
    ) -> None:
        """Raise ValueError if the rows of a column were changed otherwise than those of another batch.

        Args:
            kind: Names the column and its place in the call.
            loaded_bk, made_bk: (B, at least K) float64, the numbers before and after; None: they are the same.
            eps: The precision of the numbers after.
        """
        known = self._known.setdefault(kind, _Known(_UNKNOWN if made_bk is not None else _UNCHANGED))
        if made_bk is None and known.lines is _UNCHANGED:
            known.alike += 1
            return
        x_bk = loaded_bk[:, :POSITIONS].numpy()
        y_bk = x_bk if made_bk is None else made_bk[:, :POSITIONS].numpy()
        with np.errstate(all="ignore"):  # what is not known, and numbers that are not finite, compare as false
            lines = _UNCHANGED if made_bk is None else _Lines.through(x_bk, y_bk, eps)
            missed = np.sum(known.lines.is_missed_k(x_bk, y_bk, lines.error_k))
        varies, compared = np.sum(lines.varies_k), np.sum(lines.is_line_k & known.lines.is_line_k)
        is_alike = np.sum(lines.is_line_k) >= max(FEWEST_VALUES, 0.75 * varies)
        is_as_known = is_alike and compared and not missed
        if varies < FEWEST_VALUES or (not is_as_known and self._has_drawn()):
            return
        known.alike += 1 if is_alike else -1
        if is_alike and missed and 2 * missed >= compared and known.alike > 0:
            raise ValueError(
                f"the {who} normalises over the batch: what the rows are multiplied with, or what is added to them, "
                "is the same for all rows of a batch and another one than in an earlier batch, so that it follows "
                "the other rows (x / x.max(), (x - x.mean()) / x.std(), x / 255 if x.max() > 1). Clipping would then "
                "not bound what one example can change. Use constants that do not depend on private rows (known "
                "ones, or computed on public data), or normalise each row by itself. Let an augmentation draw from "
                "the global generators of torch, NumPy or Python. If this is a schedule, set its number on the "
                "model, by the number of the step, and multiply there."
            )
        if is_alike:
            known.lines = lines if lines is _UNCHANGED else known.lines.completed(lines)


def _values(x_bk: np.ndarray) -> np.ndarray:
    """(K,): how many numbers are different, of some at each position."""
    ordered = np.sort(x_bk[:_ROWS], 0)
    return 1 + (ordered[1:] != ordered[:-1]).sum(0)
