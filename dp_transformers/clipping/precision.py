"""What gradients are added up in."""

from __future__ import annotations

import torch
from torch import nn

HALF = (torch.bfloat16, torch.float16)
FULL_PRECISION = {"ieee", "none"}  # names of torch's settings for float32 products
TRAINABLE = (torch.float32, torch.float64, torch.bfloat16)


def sum_dtype(p: nn.Parameter) -> torch.dtype:
    """In which gradients of ``p`` are added up and noised: in float32 at least, whatever ``p`` is kept in."""
    return torch.float32 if p.dtype in HALF else p.dtype


def set_gradient(p: nn.Parameter, grad: torch.Tensor | None) -> None:
    """``p.grad = grad``, in whatever dtype it has."""
    if grad is not None and grad.dtype != p.grad_dtype:
        p.grad = None
        p.grad_dtype = grad.dtype
    p.grad = grad
