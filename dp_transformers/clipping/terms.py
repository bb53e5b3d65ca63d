"""What one parameter's per-example gradient is made of, and the three questions asked of it.

A rule never returns a gradient of shape ``(B, *p.shape)`` unless that is the cheapest thing to have. It returns a *term*:
factors from which the squared norm per example, the instantiated gradient, and the weighted sum over examples follow.

Shape legend: b example, t and s positions, p rows and d columns of the parameter, v vocabulary, e experts; n images of an example,
c channels, k kernel.

=========  ==============================  ======================================================
term       factors                         per-example gradient
=========  ==============================  ======================================================
Outer      left_btp, right_btd             sum_t left[b, t, :] ⊗ right[b, t, :]     (p, d)
Stacked    one Outer for each block        the blocks' gradients, one below the other            (p, d)
Rows       ids_bt, grad_btd, num_rows      row v: sum of grad[b, t] over t with ids[b, t] == v   (v, d)
Routed     ids_bs, left_bsp, right_bsd     e: sum of left ⊗ right over s with ids[b, s] == e     (e, p, d)
Convolved  image_bnc.., grad_bnp.., how    Outer of grad and the patches of image it came from   (p, c, k...)
Dense      grad_b...                       itself
Norm       norm_b                          not known
=========  ==============================  ======================================================

The gradient of a parameter that is used several times is the *sum* of its uses' terms; its norm is the norm of that sum
(adding squared norms is wrong in both directions), which :func:`measure` gives for any mixture.

All norms accumulate in fp32. Ghost norms follow Li et al. 2021 (arXiv 2110.05679, sec. 4); the rule for when instantiating
is cheaper is by floating-point operations: T²(d+p) against T·d·p.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from .norms import FP32, InnerProduct, Length, Measured
from .precision import factor, is_bf16, product, split

T = TypeVar("T")
LEFT_GRAM, RIGHT_GRAM = "left gram", "right gram"

# Numbers of all examples' gradients of one parameter up to which they are laid side by side with others' rather than looked at alone.
SMALL = 2**14
# Below this, a position's length is not known: its square may have vanished in float32, while its gradient, or its input, is long.
SHORTEST = 2.0**-57
# Numbers of one example that are squared and added up one after the other: of 2·10⁷ the norm would be too small by 1e-3.
PIECE = 2**14
# Scratch memory of one norm computation, in bytes; examples are taken in chunks that fit.
SCRATCH_BYTES = 64 * 2**20


def _chunks(batch: int, bytes_per_example: int) -> Iterator[slice]:
    size = max(1, SCRATCH_BYTES // max(1, bytes_per_example))
    for start in range(0, max(batch, 1), size):  # an empty batch is one empty chunk
        yield slice(start, min(start + size, batch))


def _clean_rows(x: torch.Tensor, bad_b: torch.Tensor) -> torch.Tensor:
    return x.masked_fill(bad_b.view(-1, *[1] * (x.dim() - 1)), 0)


class Memo:
    """The last result of each kind and the tensor it came from: layers that share their input (query, key, value) share work."""

    def __init__(self) -> None:
        self._last: dict[Hashable, tuple[torch.Tensor, Any]] = {}

    def get(self, kind: Hashable, x: torch.Tensor, compute: Callable[[torch.Tensor], T]) -> T:
        result = self.known(kind, x)
        if result is None:
            result = compute(x)
            self._last[kind] = (x, result)
        return result

    def known(self, kind: Hashable, x: torch.Tensor) -> Any:
        """The last result, if it came from ``x``; else None."""
        seen = self._last.get(kind)
        # holding the tensor keeps its memory from being given to another, so an equal address means the same content
        return seen[1] if seen is not None and _identity(seen[0]) == _identity(x) else None


def _identity(x: torch.Tensor) -> tuple:
    return x.data_ptr(), x.dtype, x.shape, x.stride()


@dataclass
class Dense:
    """The per-example gradient itself, ``(B, *p.shape)``; where it was summed, what ``parts`` (B, ...) over which dimensions."""

    grad: torch.Tensor
    parts: tuple[tuple[torch.Tensor, tuple[int, ...]], ...] = ()

    keeps_instance = is_bf16 = False

    def __post_init__(self) -> None:
        if self.grad.dim() == 1:  # the parameter is a single number
            self.grad = self.grad[:, None]

    @property
    def flat(self) -> torch.Tensor:
        """(B, n)."""
        flat = self.grad.flatten(1)
        return flat if flat.dtype == torch.float32 else flat.float()

    @property
    def is_small(self) -> bool:
        return self.grad.numel() <= SMALL

    def measure(self, *, instantiate: bool = False, memo: Memo | None = None) -> Measured:
        return Length(_flat_norm(self.flat))

    def lengths(self, memo: Memo | None) -> list[torch.Tensor]:
        return [_lengths(x, dims, memo) for x, dims in self.parts]

    def instance(self) -> Dense:
        return Dense(self.grad) if self.parts else self

    def weighted_sum(self, coef_b: torch.Tensor, memo: Memo | None = None) -> torch.Tensor:
        return torch.mv(self.flat.t(), coef_b).view(self.grad.shape[1:])

    def clean(self, bad_b: torch.Tensor) -> Dense:
        return Dense(_clean_rows(self.grad, bad_b))


@dataclass
class Norm:
    """A norm without the gradient it is of, ``(B,)``: the only use of its parameter, in a pass that keeps nothing."""

    norm_b: torch.Tensor

    is_bf16 = False

    def __post_init__(self) -> None:
        if self.norm_b.dim() != 1:
            raise ValueError(f"a norm sampler gives one norm for each example, (B,); got a tensor of shape {tuple(self.norm_b.shape)}.")

    def measure(self, *, instantiate: bool = False, memo: Memo | None = None) -> Measured:
        return Length(self.norm_b.float())

    def lengths(self, memo: Memo | None) -> list[torch.Tensor]:
        return []


@dataclass
class Outer:
    """A sum over positions of outer products: a weight that multiplies. ``left`` gives the rows of the parameter."""

    left: torch.Tensor
    right: torch.Tensor
    instance_memory: int = 1  # how many times what the factors take an instance may take, to be kept in their place

    def __post_init__(self) -> None:
        assert self.left.dim() == self.right.dim() == 3 and self.left.shape[:2] == self.right.shape[:2]

    @property
    def is_bf16(self) -> bool:
        return is_bf16(self.left, self.right)

    def _factor(self, x: torch.Tensor) -> torch.Tensor:
        return factor(x, bf16=self.is_bf16)

    @property
    def prefers_instance(self) -> bool:
        t, p, d = *self.left.shape[1:], self.right.shape[2]
        return t * (p + d) >= p * d

    @property
    def keeps_instance(self) -> bool:
        t, p, d = *self.left.shape[1:], self.right.shape[2]
        return self.instance_memory * t * (p * self.left.element_size() + d * self.right.element_size()) >= 4 * p * d

    def measure(self, *, instantiate: bool = False, memo: Memo | None = None) -> Measured:
        (b, t, p), d = self.left.shape, self.right.shape[2]
        gram = partial(_gram, bf16=self.is_bf16)
        if t == 1 and not instantiate:
            return Length(_flat_norm(self._factor(self.left)) * _flat_norm(self._factor(self.right)))
        by_instance = instantiate or self.prefers_instance
        if not by_instance and memo is not None and 4 * b * t * t <= SCRATCH_BYTES:
            left = memo.get((LEFT_GRAM, self.is_bf16), self.left, gram)
            return left.inner_product(memo.get((RIGHT_GRAM, self.is_bf16), self.right, gram))
        measured = []
        for rows in _chunks(b, 4 * (p * d if by_instance else 2 * t * t)):
            left, right = self.left[rows], self.right[rows]
            measured.append(Outer(left, right).instance().measure() if by_instance else gram(left).inner_product(gram(right)))
        return _joined(measured)

    def lengths(self, memo: Memo | None) -> list[torch.Tensor]:
        return [_lengths(self.left, (1,), memo) * _lengths(self.right, (1,), memo)]

    def instance(self) -> Dense:
        return Dense(product(self._factor(self.left).mT, self._factor(self.right), bf16=self.is_bf16))

    def weighted_sum(self, coef_b: torch.Tensor, memo: Memo | None = None) -> torch.Tensor:
        def scaled(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return split((x.bfloat16() if self.is_bf16 else x.float()) * coef_b[:, None, None], bf16=self.is_bf16)

        left, right, memo = self.left, self.right, memo or Memo()
        if left.shape[2] < right.shape[2]:
            right = self._factor(right)
            pairs = [(part, right) for part in memo.get(("scaled left", self.is_bf16), left, scaled)]
        else:
            left = self._factor(left)
            pairs = [(left, part) for part in memo.get(("scaled right", self.is_bf16), right, scaled)]
        return sum_of(product(x.flatten(0, 1).t(), y.flatten(0, 1), bf16=self.is_bf16) for x, y in pairs)

    def clean(self, bad_b: torch.Tensor) -> Outer:
        return Outer(_clean_rows(self.left, bad_b), _clean_rows(self.right, bad_b))


@dataclass
class Stacked:
    """A weight whose rows come in blocks, each with an input of its own: queries, keys and values projected by one parameter."""

    blocks: Sequence[Outer]

    @property
    def is_bf16(self) -> bool:
        return any(block.is_bf16 for block in self.blocks)

    @property
    def keeps_instance(self) -> bool:
        return all(block.keeps_instance for block in self.blocks)

    def measure(self, *, instantiate: bool = False, memo: Memo | None = None) -> Measured:
        norm_sq_b = [block.measure(instantiate=instantiate, memo=memo).squared() for block in self.blocks]
        return Length(torch.stack(norm_sq_b).sum(0).sqrt())

    def lengths(self, memo: Memo | None) -> list[torch.Tensor]:
        return [x for block in self.blocks for x in block.lengths(memo)]

    def instance(self) -> Dense:
        return Dense(torch.cat([block.instance().grad for block in self.blocks], 1))

    def weighted_sum(self, coef_b: torch.Tensor, memo: Memo | None = None) -> torch.Tensor:
        return torch.cat([block.weighted_sum(coef_b, memo) for block in self.blocks])

    def clean(self, bad_b: torch.Tensor) -> Stacked:
        return Stacked([block.clean(bad_b) for block in self.blocks])


@dataclass
class Rows:
    """Gradients that are added to rows of the parameter: an embedding. Equals Outer with one-hot ``left``, never built."""

    ids: torch.Tensor
    grad: torch.Tensor
    num_rows: int

    keeps_instance = is_bf16 = False

    def __post_init__(self) -> None:
        assert self.ids.dim() == 2 and self.grad.dim() == 3 and self.ids.shape == self.grad.shape[:2]

    def measure(self, *, instantiate: bool = False, memo: Memo | None = None) -> Measured:
        (b, t), d = self.ids.shape, self.grad.shape[2]
        if instantiate:
            chunks = _chunks(b, 4 * self.num_rows * d)
            return _joined([Rows(self.ids[r], self.grad[r], self.num_rows).instance().measure() for r in chunks])
        if t == 1:
            return Dense(self.grad).measure()
        # Positions of one example that share an id share a slot; the slots of an example hold exactly the rows of its gradient.
        sorted_ids, order = self.ids.sort(dim=1)
        is_repeated = sorted_ids[:, 1:] == sorted_ids[:, :-1]
        slot_sorted = torch.zeros_like(sorted_ids)
        slot_sorted[:, 1:] = (~is_repeated).cumsum(1)
        slot = torch.empty_like(slot_sorted).scatter_(1, order, slot_sorted)
        slot += torch.arange(b, device=slot.device)[:, None] * t
        lengths_bt = _norms(self.grad, [2])
        if slot.device.type != "cpu":
            (norm_b,) = Dense(_sum_rows(self.grad, slot, b * t).view(b, t * d)).measure()
            return _summed_anew(norm_b, lengths_bt)
        # Where looking costs no synchronisation, only rows that come from several positions are summed.
        shares = torch.zeros_like(self.ids, dtype=torch.bool)
        shares[:, 1:] = is_repeated
        shares[:, :-1] |= is_repeated
        shares = torch.empty_like(shares).scatter_(1, order, shares)
        slots, row = slot[shares].unique(return_inverse=True)
        rows = _sum_rows(self.grad[shares], row, len(slots))
        norm_sq_b = lengths_bt.square().masked_fill_(shares, 0.0).sum(1)
        norm_sq_b.index_add_(0, slots // t, torch.linalg.vector_norm(rows, dim=1).square())
        return _summed_anew(norm_sq_b.sqrt_(), lengths_bt)

    def lengths(self, memo: Memo | None) -> list[torch.Tensor]:
        return [_lengths(self.grad, (1,), None)]

    def instance(self) -> Dense:
        b, d = len(self.ids), self.grad.shape[2]
        offset_b = torch.arange(b, device=self.ids.device)[:, None] * self.num_rows
        return Dense(_sum_rows(self.grad, self.ids + offset_b, b * self.num_rows).view(b, self.num_rows, d))

    def weighted_sum(self, coef_b: torch.Tensor, memo: Memo | None = None) -> torch.Tensor:
        return _sum_rows(self.grad.float() * coef_b[:, None, None], self.ids, self.num_rows)

    def clean(self, bad_b: torch.Tensor) -> Rows:
        return Rows(self.ids, _clean_rows(self.grad, bad_b), self.num_rows)


@dataclass
class Routed:
    """Weights of experts, (num_experts, p, d): every routed slot of an example adds an outer product to the expert it was sent to."""

    ids: torch.Tensor
    left: torch.Tensor
    right: torch.Tensor
    num_experts: int

    def __post_init__(self) -> None:
        assert self.ids.shape == self.left.shape[:2] == self.right.shape[:2]

    @property
    def is_bf16(self) -> bool:
        return is_bf16(self.left, self.right)

    @property
    def keeps_instance(self) -> bool:
        s, p, d = *self.left.shape[1:], self.right.shape[2]
        return s * (p * self.left.element_size() + d * self.right.element_size()) >= 4 * self.num_experts * p * d

    def measure(self, *, instantiate: bool = False, memo: Memo | None = None) -> Measured:
        """Experts do not overlap, so each expert that an example uses is an Outer of its own, over the slots that were sent to it.

        They are taken together by size, powers of two, so that padding at most doubles them and uneven routing costs little more.
        """
        b = len(self.ids)
        norm_sq_b = torch.zeros(b, device=self.left.device)
        pair_of_slot = (self.ids + torch.arange(b, device=self.ids.device)[:, None] * self.num_experts).flatten()
        pairs, order = pair_of_slot.sort()
        pairs, sizes = pairs.unique_consecutive(return_counts=True)
        first, width_of = sizes.cumsum(0) - sizes, torch.frexp((sizes - 1).float()).exponent  # ceil(log2(size))
        for exponent in width_of.unique().tolist():
            members = (width_of == exponent).nonzero().squeeze(1)
            offset = torch.arange(2**exponent, device=order.device)
            padding = (offset >= sizes[members, None]).unsqueeze(-1)
            slots = order[(first[members, None] + offset).clamp(max=len(order) - 1)]
            for rows in _chunks(len(members), 4 * len(offset) * (self.left.shape[2] + self.right.shape[2])):
                left, right = (x.flatten(0, 1)[slots[rows]].masked_fill(padding[rows], 0) for x in (self.left, self.right))
                norm_sq = Outer(left, right).measure(instantiate=instantiate).squared()
                norm_sq_b.index_add_(0, pairs[members[rows]] // self.num_experts, norm_sq)
        return Length(norm_sq_b.sqrt_())

    def lengths(self, memo: Memo | None) -> list[torch.Tensor]:
        return [_lengths(self.left, (1,), None) * _lengths(self.right, (1,), None)]

    def instance(self) -> Dense:
        b, p, d = len(self.ids), self.left.shape[2], self.right.shape[2]
        offset_b = torch.arange(b, device=self.ids.device)[:, None] * self.num_experts
        left, right = (factor(x, bf16=self.is_bf16) for x in (self.left, self.right))
        by_id = _sum_by_id(self.ids + offset_b, left, right, b * self.num_experts, bf16=self.is_bf16)
        return Dense(by_id.view(b, self.num_experts, p, d))

    def weighted_sum(self, coef_b: torch.Tensor, memo: Memo | None = None) -> torch.Tensor:
        bf16 = self.is_bf16
        left, right = (factor(x, bf16=bf16) for x in (self.left, self.right))
        smaller = left if left.shape[2] < right.shape[2] else right
        parts = split(smaller * coef_b[:, None, None], bf16=bf16)
        pairs = [(part, right) if smaller is left else (left, part) for part in parts]
        return sum_of(_sum_by_id(self.ids, x, y, self.num_experts, bf16=bf16) for x, y in pairs)

    def clean(self, bad_b: torch.Tensor) -> Routed:
        return Routed(self.ids, _clean_rows(self.left, bad_b), _clean_rows(self.right, bad_b), self.num_experts)


@dataclass(frozen=True)
class Convolution:
    """How an image is convolved: the weight's shape (p, c / groups, k...), and per spatial dimension stride, padding with zeros, dilation."""

    shape: torch.Size
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def patches(self, image: torch.Tensor) -> torch.Tensor:
        """(b, n, c, *positions, *k): a view of ``image`` (b, n, c, ...), or of a padded copy."""
        if any(self.padding):
            image = F.pad(image, [width for padding in reversed(self.padding) for width in (padding, padding)])
        for dim, (k, stride, dilation) in enumerate(zip(self.shape[2:], self.stride, self.dilation, strict=True), start=3):
            image = image.unfold(dim, dilation * (k - 1) + 1, stride)[..., ::dilation]
        return image

    def weight_gradient(self, image: torch.Tensor, grad: torch.Tensor, examples: int = 1) -> torch.Tensor:
        """(examples · p, ...): the native gradient for ``image`` (n, examples · c, ...), where the examples are further groups."""
        weight = grad.new_empty(()).expand(examples * self.shape[0], *self.shape[1:])  # only its shape matters
        how = (self.stride, self.padding, self.dilation, False, [0] * len(self.stride), examples * self.groups)
        return torch.ops.aten.convolution_backward(grad, image, weight, None, *how, (False, True, False))[1]


@dataclass
class Convolved:
    """A convolution's weight, from ``image`` (b, n, c, ...) and ``grad`` (b, n, p, ...): Outer without its patches."""

    image: torch.Tensor
    grad: torch.Tensor
    how: Convolution

    is_bf16 = False

    def __post_init__(self) -> None:
        assert self.image.shape[:2] == self.grad.shape[:2] and self.image.dim() == self.grad.dim() == len(self.how.shape) + 1

    @property
    def _sizes(self) -> tuple[int, int, int]:
        """t positions, p rows and d columns, of one group."""
        return self.grad.shape[1] * self.grad.shape[3:].numel(), self.how.shape[0] // self.how.groups, self.how.shape[1:].numel()

    @property
    def prefers_instance(self) -> bool:
        t, p, d = self._sizes
        return t * (p + d) >= p * d

    @property
    def keeps_instance(self) -> bool:
        return self.prefers_instance

    def measure(self, *, instantiate: bool = False, memo: Memo | None = None) -> Measured:
        t, p, d = self._sizes
        by_instance = instantiate or self.prefers_instance
        numbers = p * d if by_instance else t * (p + d + 2 * t)
        measured = []
        for rows in _chunks(len(self.grad), 4 * self.how.groups * numbers):
            part = Convolved(self.image[rows], self.grad[rows], self.how)
            measured.append(part.instance().measure() if by_instance else part._ghost_norm())
        return _joined(measured)

    def _ghost_norm(self) -> Length:
        (t, p, d), groups, b = self._sizes, self.how.groups, len(self.grad)
        dims = len(self.how.stride)
        patches = self.how.patches(self.image.float()).unflatten(2, (groups, -1))  # b n groups c positions k
        positions, kernel = range(4, 4 + dims), range(4 + dims, 4 + 2 * dims)
        patches = patches.permute(0, 2, 3, *kernel, 1, *positions).reshape(b * groups, d, t)
        grad = self.grad.float().unflatten(2, (groups, p)).movedim(1, 3).reshape(b * groups, p, t)
        return Length(_gram(grad.mT).inner_product(_gram(patches.mT)).squared().view(b, groups).sum(1).sqrt())

    def lengths(self, memo: Memo | None) -> list[torch.Tensor]:
        groups, dims = self.how.groups, len(self.how.stride)
        image, grad = (x.float().square().unflatten(2, (groups, -1)).sum(3) for x in (self.image, self.grad))
        patches = self.how.patches(image).flatten(3 + dims).sum(-1)
        return [(patches * grad).sum(2).flatten(1).sqrt()]

    def instance(self) -> Dense:
        b = len(self.grad)
        if b == 0:
            return Dense(self.grad.new_zeros(0, *self.how.shape, dtype=torch.float32))
        image, grad = (x.float().transpose(0, 1).flatten(1, 2) for x in (self.image, self.grad))
        return Dense(self.how.weight_gradient(image, grad, examples=b).view(b, *self.how.shape))

    def weighted_sum(self, coef_b: torch.Tensor, memo: Memo | None = None) -> torch.Tensor:
        smaller, larger = sorted((self.image, self.grad), key=torch.Tensor.numel)
        scaled = smaller.float() * coef_b.view(-1, *[1] * (smaller.dim() - 1))
        image, grad = (scaled, larger) if smaller is self.image else (larger, scaled)
        return self.how.weight_gradient(image.flatten(0, 1).float(), grad.flatten(0, 1).float())

    def clean(self, bad_b: torch.Tensor) -> Convolved:
        return Convolved(_clean_rows(self.image, bad_b), _clean_rows(self.grad, bad_b), self.how)


Term = Dense | Norm | Outer | Stacked | Rows | Routed | Convolved


@dataclass
class Gram:
    """Inner products between the positions of each example, (B, T, T)."""

    products_bts: torch.Tensor

    @cached_property
    def lengths_bt(self) -> torch.Tensor:
        return self.products_bts.diagonal(dim1=1, dim2=2).clamp(min=SHORTEST**2).sqrt()

    def inner_product(self, other: Gram) -> InnerProduct:
        """The ghost norm, sum_{t,s} left[t, s]·right[t, s].

        Each product is rounded by a fraction of both positions' lengths, left times right. The traces' product would bound that too, but it
        multiplies the inputs of some positions with the gradients of others, which dwarfs a norm where padding has gradients and no input.
        """
        return InnerProduct.between((self.products_bts * other.products_bts).sum((1, 2)), self.lengths_bt * other.lengths_bt)


def _gram(x_btd: torch.Tensor, *, bf16: bool = False) -> Gram:
    x_btd = factor(x_btd, bf16=bf16)
    return Gram(product(x_btd, x_btd.mT, bf16=bf16))


def _joined(measured: Sequence[Measured]) -> Measured:
    """Of chunks of examples, all."""
    return measured[0] if len(measured) == 1 else type(measured[0])(*map(torch.cat, zip(*measured, strict=True)))


def _summed_anew(norm_b: torch.Tensor, lengths_bt: torch.Tensor) -> Length:
    """A sum that rounds every position anew, after it is multiplied."""
    return Length(FP32.lengthened(norm_b, lengths_bt))


def sum_of(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """Of one tensor or several, without a copy of the first."""
    return reduce(torch.Tensor.add_, parts)


def summed(x: torch.Tensor, dims: Sequence[int]) -> Dense:
    """``x`` (B, ...) summed over ``dims`` in float32: the gradient of what is added, or scales one by one."""
    return Dense(x.sum(tuple(dims), dtype=torch.float32), ((x, tuple(dims)),)) if dims else Dense(x.float())


def _sum_rows(grad_btd: torch.Tensor, ids_bt: torch.Tensor, num_rows: int) -> torch.Tensor:
    """(num_rows, d): what an embedding's backward does, with the kernel that does it."""
    flat = grad_btd.reshape(-1, grad_btd.shape[-1]).float()
    return torch.ops.aten.embedding_dense_backward(flat, ids_bt.reshape(-1), num_rows, -1, False)


def _sum_by_id(ids_bs: torch.Tensor, left_bsp: torch.Tensor, right_bsd: torch.Tensor, num_ids: int, *, bf16: bool) -> torch.Tensor:
    """(num_ids, p, d): for each id the sum of left ⊗ right over the slots that have it, one product of matrices for each."""
    ids, order = ids_bs.flatten().sort()
    left, right = left_bsp.flatten(0, 1)[order], right_bsd.flatten(0, 1)[order]
    total = left.new_zeros(num_ids, left.shape[1], right.shape[1], dtype=torch.float32)
    start = 0
    for i, size in enumerate(torch.bincount(ids, minlength=num_ids).tolist()):
        if size:
            total[i] = product(left[start : start + size].t(), right[start : start + size], bf16=bf16)
        start += size
    return total


def _stacked(terms: Sequence[Outer | Stacked]) -> Outer | Stacked:
    """The sum of several, in blocks as fine as theirs."""
    blocks_of = [t.blocks if isinstance(t, Stacked) else [t] for t in terms]
    ends = [list(accumulate(block.left.shape[2] for block in blocks)) for blocks in blocks_of]
    cuts = sorted(set().union(*ends))
    found = []
    for start, end in pairwise([0, *cuts]):
        parts = []
        for blocks, block_ends in zip(blocks_of, ends, strict=True):
            i = bisect_left(block_ends, end)
            offset = block_ends[i] - blocks[i].left.shape[2]
            parts.append(Outer(blocks[i].left[..., start - offset : end - offset], blocks[i].right))
        found.append(Outer(torch.cat([x.left for x in parts], 1), torch.cat([x.right for x in parts], 1)))
    return found[0] if len(found) == 1 else Stacked(found)


def merge(terms: Sequence[Term]) -> list[Term]:
    """The same sum with at most one term of each kind: factors of equal kind concatenate along the positions.

    Convolutions do along the images, where these are alike; else their instances are added.
    """
    if len(terms) == 1:
        return list(terms)
    merged: list[Term] = []
    if outers := [t for t in terms if isinstance(t, Outer | Stacked)]:
        merged.append(_stacked(outers))
    if rows := [t for t in terms if isinstance(t, Rows)]:
        ids, grad = torch.cat([t.ids for t in rows], 1), torch.cat([t.grad for t in rows], 1)
        merged.append(Rows(ids, grad, rows[0].num_rows))
    if routed := [t for t in terms if isinstance(t, Routed)]:
        ids, left, right = (torch.cat(parts, 1) for parts in zip(*((t.ids, t.left, t.right) for t in routed), strict=True))
        merged.append(Routed(ids, left, right, routed[0].num_experts))
    dense = [t for t in terms if isinstance(t, Dense)]
    if convolved := [t for t in terms if isinstance(t, Convolved)]:
        if len({(t.image.shape, t.how) for t in convolved}) == 1:
            image, grad = torch.cat([t.image for t in convolved], 1), torch.cat([t.grad for t in convolved], 1)
            merged.append(Convolved(image, grad, convolved[0].how))
        else:
            dense += [t.instance() for t in convolved]
    if dense:
        grads = [t.grad.view_as(dense[0].grad) for t in dense]  # an instance may be flat, as (b, p, d)
        parts = tuple(x for t in dense for x in t.parts)
        merged.append(Dense(torch.stack(grads).sum(0), parts) if len(dense) > 1 else dense[0])
    return merged


def measure(terms: Sequence[Term], *, instantiate: bool = False, memo: Memo | None = None) -> Measured:
    """The norm per example of the sum of ``terms``, all uses of one parameter, in float32.

    An embedding tied to the head that reads it out is E + H with ‖E+H‖² = ‖E‖² + ‖H‖² + 2⟨E, H⟩, and
    ⟨E, H⟩ = sum_{t,s} left_H[t, id_s]·⟨right_H[t], grad_E[s]⟩ needs no (V, d) tensor. Other mixtures are instantiated.
    """
    terms = merge(terms)
    if len(terms) == 1:
        return terms[0].measure(instantiate=instantiate, memo=memo)
    if instantiate or [type(t) for t in terms] != [Outer, Rows]:
        total = terms[0].instance().grad.flatten(1)
        for term in terms[1:]:
            total = total + term.instance().grad.flatten(1)
        return Dense(total).measure()
    outer, rows = terms
    cross_b, lengths = [], []
    (b, t), s, (p, _d) = outer.left.shape[:2], rows.ids.shape[1], (outer.left.shape[2], outer.right.shape[2])
    for chunk in _chunks(b, 4 * (2 * t * s + (t * p if outer.left.dtype != torch.float32 else 0))):
        left, right = (factor(x[chunk], bf16=outer.is_bf16).float() for x in (outer.left, outer.right))
        grad, ids = rows.grad[chunk].float(), rows.ids[chunk]
        picked_bts = left.gather(2, ids[:, None, :].expand(-1, t, -1))
        cross_b.append((picked_bts * torch.bmm(right, grad.mT)).sum((1, 2)))
        lengths.append(torch.cat([_norms(left, [2]) * _norms(right, [2]), _norms(grad, [2])], 1))
    norm_sq_b = outer.measure().squared() + rows.measure().squared() + 2 * torch.cat(cross_b)
    return InnerProduct.between(norm_sq_b, torch.cat(lengths))  # the two uses may cancel


def small_gradient(terms: Sequence[Term]) -> Dense | None:
    """The one term of a parameter, if that is a gradient so small that calls count more than numbers."""
    return terms[0] if len(terms) == 1 and isinstance(terms[0], Dense) and terms[0].is_small else None


def position_lengths(terms: Sequence[Term], memo: Memo | None = None) -> torch.Tensor | None:
    """(B, n): how long every position's part of the gradient is; None where that is not known, or there are no positions."""
    lengths = [x for term in terms for x in term.lengths(memo) if x.shape[1]]
    return (torch.cat(lengths, 1) if len(lengths) > 1 else lengths[0]) if lengths else None


def _lengths(x: torch.Tensor, summed_dims: Sequence[int], memo: Memo | None) -> torch.Tensor:
    """(B, n): of the vectors that are summed over these dimensions, read off inner products where a norm has just computed them."""
    for kind in ((gram, bf16) for gram in (LEFT_GRAM, RIGHT_GRAM) for bf16 in (False, True)) if memo is not None else ():
        gram = memo.known(kind, x)
        if gram is not None:
            return gram.lengths_bt
    kept = [dim for dim in range(1, x.dim()) if dim not in summed_dims]
    return (_norms(x, kept) if kept else x.float().abs()).flatten(1)


def _norms(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """Over ``dims``, in float32 at least, as float32."""
    return torch.linalg.vector_norm(x, dim=dims, dtype=torch.promote_types(x.dtype, torch.float32)).float()


def _flat_norm(x: torch.Tensor) -> torch.Tensor:
    """(B,): of long gradients the norm of their pieces' norms, because on the CPU torch adds up one number after the other."""
    flat, norm = x.flatten(1), torch.linalg.vector_norm
    if flat.shape[1] <= 2 * PIECE:
        return norm(flat, dim=1)
    whole = flat.shape[1] // PIECE * PIECE
    pieces = norm(flat[:, :whole].unflatten(1, (-1, PIECE)), dim=2)
    return norm(torch.cat([pieces, norm(flat[:, whole:], dim=1, keepdim=True)], 1), dim=1)
