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
        by: The factor: a tensor, of one number or of as many as were joined before; a number where none was given.
        own: What each example's number is multiplied with before, where that is one number for all; else 1.
        of_row: Whether it is that of a loss of one row, which is added to those of others.
    """

    is_sum: bool
    by: Any
    own: float = 1.0
    of_row: bool = False

    @property
    def is_none(self) -> bool:
        """Whether nothing is multiplied, or divided."""
        return not isinstance(self.by, torch.Tensor) and self.own == 1


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
        of one number each. A batch of one example is no first one: its mean is its sum. In one of other parts the
        weights are those of the first one, or some of them, or these are some of its."""
        if self._first is None:
            self._first = (factors, size) if size > 1 else None
            return
        mine, others = self._both(factors, size), self._both(*self._first)
        if [each.is_sum for each in self._first[0]] == [each.is_sum for each in factors]:
            yield from (_is_among(each, [other]) for each, other in zip(mine, others, strict=True))
        elif mine and others and all(x.device.type == "cpu" for pair in (*mine, *others) for x in pair):
            fewer, more = sorted((mine, others), key=len)
            yield torch.stack([_is_among(each, more) for each in fewer]).all()

    def follow_size(self, factors: list[Factor], size: int) -> bool:
        """Whether some weight was another one in each of the last batches of different sizes, as large as the size, or
        its inverse. Weights on another device are not looked at."""
        if size < 2 or size in self._sizes:
            return False
        weights = [with_own for _, with_own in self._both(factors, size)]
        weights = [x if x.device.type == "cpu" else x.new_zeros(0, device="cpu") for x in weights]
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

    def _both(self, factors: list[Factor], size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What the loss that is expected (the mean, or the sum) is multiplied with, without what is each example's own
        and with it. Examples that have numbers of their own may have the same by chance."""
        by = [torch.as_tensor(each.by).float().flatten() for each in factors]
        by = [x * size if each.is_sum and self._of_means else x for each, x in zip(factors, by, strict=True)]
        return [(x, x * each.own) for each, x in zip(factors, by, strict=True)]


def _is_among(
    weights: tuple[torch.Tensor, torch.Tensor], others: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> torch.Tensor:
    """Whether a weight is one of others, without what is each example's own or with it."""
    close = [_are_close(mine, its, rtol=1e-4) for other in others for mine, its in zip(weights, other, strict=True)]
    return torch.stack(close).any()


def _are_all_close(weights: Sequence[torch.Tensor]) -> bool:
    return all(bool(_are_close(each, weights[0], rtol=1e-5)) for each in weights)


def _are_close(weight: torch.Tensor, other: torch.Tensor, *, rtol: float) -> torch.Tensor:
    if weight.shape != other.shape:
        return torch.zeros((), dtype=torch.bool, device=weight.device)
    return torch.isclose(weight, other.to(weight.device), rtol=rtol).all()
