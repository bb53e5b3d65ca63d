"""What means and sums over examples are multiplied with in the losses of a loop, compared between batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

_SIZES = 3  # a schedule may follow the sizes of two batches by chance


class Factor(NamedTuple):
    """What a mean, or a sum, over examples is multiplied with in a loss, as far as that is one number.

    Attributes:
        is_sum: Whether it is a sum.
        by: The factor: 1.0 where there is none, or a tensor: of one number, or of as many as were joined before.
        of_row: Whether it is that of a loss of one row, which is added to those of others.
    """

    is_sum: bool
    by: Any
    of_row: bool = False

    @property
    def is_none(self) -> bool:
        """Whether nothing is multiplied, or divided."""
        return not isinstance(self.by, torch.Tensor) and self.by == 1


class FactorsOfDraws:
    """Compares the weight that an example has in the losses of batches of other examples, or of another number.

    Args:
        of_means: Whether losses are means over a physical batch; else they are sums.
    """

    def __init__(self, *, of_means: bool):
        self._of_means = of_means
        self._first: tuple[list[Factor], int] | None = None  # of the draw's first batch, and its size
        self._last: list[tuple[list[torch.Tensor], int]] = []  # weights in the last batches, each of another size

    def begin_draw(self) -> None:
        """The next batch is the first one of a draw."""
        self._first = None

    def are_same(self, factors: list[Factor], size: int) -> Iterator[torch.Tensor]:
        """Yields, for each mean or sum, whether the weight of an example is that in the draw's first batch, as tensors
        of one number each. A batch of one example is no first one: its mean is its sum."""
        if self._first is None:
            self._first = (factors, size) if size > 1 else None
            return
        others, other_size = self._first
        if [each.is_sum for each in others] == [each.is_sum for each in factors]:  # else it is of other parts
            pairs = zip(self._weights(factors, size), self._weights(others, other_size), strict=True)
            yield from (_are_close(*pair, rtol=1e-4) for pair in pairs)

    def follow_size(self, factors: list[Factor], size: int) -> bool:
        """Whether some weight was another one in each of the last batches of different sizes, as large as the size, or
        its inverse. Weights on another device are not looked at."""
        if size < 2 or size in self._sizes:
            return False
        weights = [x if x.device.type == "cpu" else x.new_zeros(0, device="cpu") for x in self._weights(factors, size)]
        if self._last and [x.shape for x in weights] != [x.shape for x in self._last[0][0]]:
            self._last = []
        self._last = [*self._last, (weights, size)][-_SIZES:]
        of_each = zip(*(weights for weights, _ in self._last), strict=True)
        return len(self._last) == _SIZES and any(map(self._follows_size, of_each))

    def _follows_size(self, weights: tuple[torch.Tensor, ...]) -> bool:
        by_size = [weight / size for weight, size in zip(weights, self._sizes, strict=True)]
        times_size = [weight * size for weight, size in zip(weights, self._sizes, strict=True)]
        return not _are_all_close(weights) and (_are_all_close(by_size) or _are_all_close(times_size))

    @property
    def _sizes(self) -> list[int]:
        return [size for _, size in self._last]

    def _weights(self, factors: list[Factor], size: int) -> list[torch.Tensor]:
        """What the loss that is expected is multiplied with: the mean, or the sum."""
        by = [torch.as_tensor(each.by).float().flatten() for each in factors]
        return [x * size if each.is_sum and self._of_means else x for each, x in zip(factors, by, strict=True)]


def _are_all_close(weights: Sequence[torch.Tensor]) -> bool:
    return all(bool(_are_close(each, weights[0], rtol=1e-5)) for each in weights)


def _are_close(weight: torch.Tensor, other: torch.Tensor, *, rtol: float) -> torch.Tensor:
    if weight.shape != other.shape:
        return torch.zeros((), dtype=torch.bool)
    return torch.isclose(weight, other.to(weight.device), rtol=rtol).all()
