"""Terms of the weights of convolutions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..norms import DirectNorm, Measured
from .arithmetic import LastResultCache, Regrouping, chunks, is_cheaper_instantiated, joined, zero_rows
from .dense import Dense
from .gram import gram_of


@dataclass(frozen=True)
class Convolution:
    """The options of a convolution: the weight's shape (p, c / groups, k...), and stride, zero padding and dilation of
    each spatial dimension."""

    shape: torch.Size
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def patches(self, image: torch.Tensor) -> torch.Tensor:
        """Return (b, n, c, *positions, *k), a view of ``image`` (b, n, c, ...) or of a padded copy."""
        if any(self.padding):
            image = F.pad(image, [width for padding in reversed(self.padding) for width in (padding, padding)])
        for dim, (k, stride, dilation) in enumerate(
            zip(self.shape[2:], self.stride, self.dilation, strict=True), start=3
        ):
            image = image.unfold(dim, dilation * (k - 1) + 1, stride)[..., ::dilation]
        return image

    def weight_gradient(self, image: torch.Tensor, grad: torch.Tensor, examples: int = 1) -> torch.Tensor:
        """Return the (examples · p, ...) native gradient for ``image`` (n, examples · c, ...), with examples as
        groups."""
        weight = grad.new_empty(()).expand(examples * self.shape[0], *self.shape[1:])  # only its shape matters
        how = (self.stride, self.padding, self.dilation, False, [0] * len(self.stride), examples * self.groups)
        return torch.ops.aten.convolution_backward(grad, image, weight, None, *how, (False, True, False))[1]


@dataclass
class Convolved:
    """The term of a convolution's weight, with ``image`` (b, n, c, ...) and ``grad`` (b, n, p, ...). It equals an
    Outer of patches, which are not stored."""

    image: torch.Tensor
    grad: torch.Tensor
    how: Convolution

    is_bf16 = False

    def __post_init__(self) -> None:
        assert (
            self.image.shape[:2] == self.grad.shape[:2]
            and self.image.dim() == self.grad.dim() == len(self.how.shape) + 1
        )

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Numbers of positions, rows and columns of one group."""
        return (
            self.grad.shape[1] * self.grad.shape[3:].numel(),
            self.how.shape[0] // self.how.groups,
            self.how.shape[1:].numel(),
        )

    @property
    def cheaper_instantiated(self) -> bool:
        return is_cheaper_instantiated(*self.sizes)

    @property
    def store_instantiated(self) -> bool:
        return self.cheaper_instantiated

    def norm(self, *, instantiate: bool = False, cache: LastResultCache | None = None) -> Measured:
        t, p, d = self.sizes
        by_instance = instantiate or self.cheaper_instantiated
        numbers = p * d if by_instance else t * (p + d + 2 * t)
        measured = []
        for rows in chunks(len(self.grad), 4 * self.how.groups * numbers):
            part = Convolved(self.image[rows], self.grad[rows], self.how)
            measured.append(part.instantiate().norm() if by_instance else part._ghost_norm())
        return joined(measured)

    def _ghost_norm(self) -> DirectNorm:
        (t, p, d), groups, b = self.sizes, self.how.groups, len(self.grad)
        dims = len(self.how.stride)
        patches = self.how.patches(self.image.float()).unflatten(2, (groups, -1))  # b n groups c positions k
        positions, kernel = range(4, 4 + dims), range(4 + dims, 4 + 2 * dims)
        patches = patches.permute(0, 2, 3, *kernel, 1, *positions).reshape(b * groups, d, t)
        grad = self.grad.float().unflatten(2, (groups, p)).movedim(1, 3).reshape(b * groups, p, t)
        return DirectNorm(gram_of(grad.mT).inner_product(gram_of(patches.mT)).squared().view(b, groups).sum(1).sqrt())

    def position_norms(self, cache: LastResultCache | None) -> list[torch.Tensor]:
        groups, dims = self.how.groups, len(self.how.stride)
        image, grad = (x.float().square().unflatten(2, (groups, -1)).sum(3) for x in (self.image, self.grad))
        patches = self.how.patches(image).flatten(3 + dims).sum(-1)
        return [(patches * grad).sum(2).flatten(1).sqrt()]

    def instantiate(self) -> Dense:
        b = len(self.grad)
        if b == 0:
            return Dense(self.grad.new_zeros(0, *self.how.shape, dtype=torch.float32))
        image, grad = (x.float().transpose(0, 1).flatten(1, 2) for x in (self.image, self.grad))
        return Dense(self.how.weight_gradient(image, grad, examples=b).view(b, *self.how.shape))

    def weighted_sum(self, coef_b: torch.Tensor, cache: LastResultCache | None = None) -> torch.Tensor:
        smaller, larger = sorted((self.image, self.grad), key=torch.Tensor.numel)
        scaled = smaller.float() * coef_b.view(-1, *[1] * (smaller.dim() - 1))
        image, grad = (scaled, larger) if smaller is self.image else (larger, scaled)
        return self.how.weight_gradient(image.flatten(0, 1).float(), grad.flatten(0, 1).float())

    def zero_examples(self, invalid_b: torch.Tensor) -> Convolved:
        return Convolved(zero_rows(self.image, invalid_b), zero_rows(self.grad, invalid_b), self.how)

    def regrouped(self, regrouping: Regrouping) -> Convolved:
        return Convolved(regrouping.joined(self.image), regrouping.joined(self.grad), self.how)
