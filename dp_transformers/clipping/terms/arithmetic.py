"""The arithmetic of norms and sums of terms: chunks that fit into memory, norms that do not lose digits, sums without
copies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce

import torch

from ..norms import DirectNorm, Measured
from ..rounding import FP32

# Numbers of one example that are squared and added up one after the other: of 2·10⁷ the norm would be too small by
# 1e-3.
PIECE = 2**14
# Scratch memory of one norm computation, in bytes; examples are taken in chunks that fit.
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
    """A sum that rounds every position anew, after it is multiplied."""
    return DirectNorm(FP32.inflate(norm_b, lengths_bt))


def sum_of(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """Sum, accumulating into the first."""
    return reduce(torch.Tensor.add_, parts)


def sum_rows(grad_btd: torch.Tensor, ids_bt: torch.Tensor, num_rows: int) -> torch.Tensor:
    """(num_rows, d): what an embedding's backward does, with the kernel that does it."""
    flat = grad_btd.reshape(-1, grad_btd.shape[-1]).float()
    return torch.ops.aten.embedding_dense_backward(flat, ids_bt.reshape(-1), num_rows, -1, False)


def norms_over(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """Returns the norms over ``dims``, computed in float32 at least, as float32."""
    return torch.linalg.vector_norm(x, dim=dims, dtype=torch.promote_types(x.dtype, torch.float32)).float()


def flat_norm(x: torch.Tensor) -> torch.Tensor:
    """(B,): of long gradients the norm of their pieces' norms, because on the CPU torch adds up one number after the
    other."""
    flat, norm = x.flatten(1), torch.linalg.vector_norm
    if flat.shape[1] <= 2 * PIECE:
        return norm(flat, dim=1)
    whole = flat.shape[1] // PIECE * PIECE
    pieces = norm(flat[:, :whole].unflatten(1, (-1, PIECE)), dim=2)
    return norm(torch.cat([pieces, norm(flat[:, whole:], dim=1, keepdim=True)], 1), dim=1)
