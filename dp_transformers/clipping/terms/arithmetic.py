"""Arithmetic of norms and sums of terms: in chunks that fit into memory, without loss of digits and without copies;
the choice between factors and gradients; and a cache of results that layers share."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import Any, TypeVar

import torch

from ..norms import FP32, DirectNorm, Measured

T = TypeVar("T")

# Numbers that are squared and added up one after the other. With 2·10⁷ numbers, the norm would be too small by 1e-3.
PIECE = 2**14
# Scratch memory of one norm computation, in bytes. Examples are processed in chunks that fit.
SCRATCH_BYTES = 64 * 2**20


def chunks(batch: int, bytes_per_example: int) -> Iterator[slice]:
    size = max(1, SCRATCH_BYTES // max(1, bytes_per_example))
    for start in range(0, max(batch, 1), size):  # an empty batch is one empty chunk
        yield slice(start, min(start + size, batch))


def zero_rows(x: torch.Tensor, invalid_b: torch.Tensor) -> torch.Tensor:
    return x.masked_fill(invalid_b.view(-1, *[1] * (x.dim() - 1)), 0)


def joined(measured: Sequence[Measured]) -> Measured:
    """Concatenate the results of chunks of examples."""
    return measured[0] if len(measured) == 1 else type(measured[0])(*map(torch.cat, zip(*measured, strict=True)))


def summed_anew(norm_b: torch.Tensor, lengths_bt: torch.Tensor) -> DirectNorm:
    """Return a norm with the allowance for a sum that rounds every position separately, after its multiplication."""
    return DirectNorm(FP32.inflate(norm_b, lengths_bt))


def sum_of(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """Sum, accumulating into the first."""
    return reduce(torch.Tensor.add_, parts)


def sum_rows(grad_btd: torch.Tensor, ids_bt: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return (num_rows, d), the sums of gradients by row, computed by the kernel of an embedding's backward."""
    flat = grad_btd.reshape(-1, grad_btd.shape[-1]).float()
    return torch.ops.aten.embedding_dense_backward(flat, ids_bt.reshape(-1), num_rows, -1, False)


def norms_over(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """Return the float32 norms over ``dims``, computed in float32 at least."""
    return torch.linalg.vector_norm(x, dim=dims, dtype=torch.promote_types(x.dtype, torch.float32)).float()


def flat_norm(x: torch.Tensor) -> torch.Tensor:
    """Return the (B,) norms. For long gradients it is the norm of their pieces' norms, because torch adds up numbers
    one after the other on the CPU."""
    flat, norm = x.flatten(1), torch.linalg.vector_norm
    if flat.shape[1] <= 2 * PIECE:
        return norm(flat, dim=1)
    whole = flat.shape[1] // PIECE * PIECE
    pieces = norm(flat[:, :whole].unflatten(1, (-1, PIECE)), dim=2)
    return norm(torch.cat([pieces, norm(flat[:, whole:], dim=1, keepdim=True)], 1), dim=1)


# ---- factors or instantiated gradients: by operations for the norm, by memory for storage ----


def is_cheaper_instantiated(positions: int, rows: int, columns: int) -> bool:
    """Return True if the norm of a (rows, columns) gradient, a sum of outer products over positions, takes fewer
    floating-point operations from the gradient (T·p·d) than as a ghost norm (T²(p + d))."""
    return positions * (rows + columns) >= rows * columns


def is_smaller_instantiated(left_btp: torch.Tensor, right_btd: torch.Tensor, numbers: int, *, times: int = 1) -> bool:
    """Return True if an example's gradient of ``numbers`` float32 numbers takes at most ``times`` the memory of its
    factors."""
    (t, p), d = left_btp.shape[1:], right_btd.shape[2]
    return times * t * (p * left_btp.element_size() + d * right_btd.element_size()) >= 4 * numbers


class LastResultCache:
    """Keeps the last result of each kind, and a weak reference to its input: layers with the same input (query, key,
    value) share work."""

    def __init__(self) -> None:
        self._last: dict[Hashable, tuple[weakref.ref[torch.UntypedStorage], tuple, Any]] = {}

    def get(self, kind: Hashable, x: torch.Tensor, compute: Callable[[torch.Tensor], T]) -> T:
        result = self.known(kind, x)
        if result is None:
            result = compute(x)
            self._last[kind] = (weakref.ref(x.untyped_storage()), _place(x), result)
        return result

    def known(self, kind: Hashable, x: torch.Tensor) -> Any:
        """Return the last result if it was computed from ``x``, else None."""
        if kind not in self._last:
            return None
        storage, place, result = self._last[kind]
        return result if storage() is x.untyped_storage() and place == _place(x) else None


@dataclass
class Regrouping:
    """The rows of units of one size (:mod:`..units`).

    Attributes:
        rows_ur: (U, R) indices of rows.
        is_padding_ur: (U, R), True where a unit has fewer rows.
        cache: Results that layers with the same input share.
    """

    rows_ur: torch.Tensor
    is_padding_ur: torch.Tensor
    cache: LastResultCache = field(default_factory=LastResultCache)

    @cached_property
    def _is_view(self) -> bool:
        """True if the rows are in the order of the batch already."""
        rows, number = self.rows_ur.flatten(), self.rows_ur.numel()
        return not self._has_padding and torch.equal(rows, torch.arange(number, device=rows.device))

    @cached_property
    def _has_padding(self) -> bool:
        return bool(self.is_padding_ur.any())

    def apart(self, x: torch.Tensor) -> torch.Tensor:
        """Return (U, R, ...) of (B, ...), with zeros for padding."""
        if self._is_view and len(x) == self.rows_ur.numel():
            return x.unflatten(0, self.rows_ur.shape)
        x = x[self.rows_ur]
        if not self._has_padding:
            return x
        return x.masked_fill_(self.is_padding_ur.view(*self.rows_ur.shape, *[1] * (x.dim() - 2)), 0)

    def joined(self, x: torch.Tensor, kind: str = "") -> torch.Tensor:
        """Return (U, R * T, ...) of (B, T, ...): the positions of all rows of a unit, one row after the other. Of each
        kind the last one is kept."""
        return self.cache.get(f"joined {kind}", x, lambda x: self.apart(x).flatten(1, 2))


def _place(x: torch.Tensor) -> tuple:
    """Return a tensor's place in its storage."""
    return x.storage_offset(), x.dtype, x.shape, x.stride()
