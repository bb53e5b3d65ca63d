"""Matrix products and gradient sums in a controlled precision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import nn

HALF = (torch.bfloat16, torch.float16)
FULL_PRECISION = {"ieee", "none"}  # names of torch's settings for float32 products
DTYPE_OF_PRODUCTS = {"tf32": torch.float16, "bf16": torch.bfloat16}  # dtypes with as many bits of mantissa
_AS_IT_IS = nullcontext()
TRAINABLE = (torch.float32, torch.float64, torch.bfloat16)


def product_settings(device: torch.device) -> tuple[Any, Any]:
    """Return the objects that hold torch's precision of fp32 matrix products, and of convolutions."""
    backends: Any = torch.backends  # torch's types lack mkldnn's settings and those of convolutions
    return (
        (backends.cuda.matmul, backends.cudnn.conv)
        if device.type == "cuda"
        else (backends.mkldnn.matmul, backends.mkldnn.conv)
    )


def reduced_products(device: torch.device) -> list[Any]:
    """Return the :func:`product_settings` that are less than full float32."""
    return [setting for setting in product_settings(device) if setting.fp32_precision not in FULL_PRECISION]


def exact_arithmetic(device: torch.device, reduced: list[Any] | None = None) -> AbstractContextManager:
    """Compute in full fp32 inside the context, without gradients, TF32 or bf16 products. ``reduced`` are the
    :func:`reduced_products`, if they are known."""
    reduced = reduced_products(device) if reduced is None else reduced
    if reduced:
        return _in_full(reduced)
    return torch.no_grad() if torch.is_grad_enabled() else _AS_IT_IS


@contextmanager
def _in_full(settings: list[Any]) -> Iterator[None]:
    with full_products(settings), torch.no_grad():
        yield


@contextmanager
def full_products(settings: Sequence[Any]) -> Iterator[bool]:
    """Set these :func:`product_settings` to full float32 inside the context. Yield True if they were not."""
    before = [setting.fp32_precision for setting in settings]
    for setting in settings:
        setting.fp32_precision = "ieee"
    try:
        yield not set(before) <= FULL_PRECISION
    finally:
        for setting, precision in zip(settings, before, strict=True):
            setting.fp32_precision = precision


def without_autocast(device: torch.device) -> AbstractContextManager:
    """Leave an autocast region inside the context."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


def is_bf16(*factors: torch.Tensor) -> bool:
    """Return True if these were multiplied in bf16: if one is bf16, autocast rounded all."""
    return any(x.dtype == torch.bfloat16 for x in factors)


def factor(x: torch.Tensor, *, bf16: bool) -> torch.Tensor:
    """Return ``x`` as an argument of :func:`product`, rounded to bf16 if ``bf16``."""
    if not bf16:
        return x.float()
    return x.bfloat16() if _multiplies_bf16(x) else x.bfloat16().float()


def product(left: torch.Tensor, right: torch.Tensor, *, bf16: bool) -> torch.Tensor:
    """Multiply two matrices or batches of them, each a :func:`factor`. Return float32.

    bf16 hardware is several times as fast and equally exact: products of two such numbers are not rounded, and sums
    are in float32. Elsewhere bf16 factors are multiplied in float32."""
    multiply = torch.mm if left.dim() == 2 else torch.bmm
    if left.dtype == torch.bfloat16:
        return multiply(left, right, out_dtype=torch.float32)
    if not (bf16 and _rounds_to_bf16(left)):
        return multiply(left, right)
    setting = torch.backends.mkldnn.matmul  # pyrefly: ignore[missing-attribute]  (set when torch is imported)
    before, setting.fp32_precision = setting.fp32_precision, "bf16"
    try:
        return multiply(left, right)
    finally:
        setting.fp32_precision = before


def split(x: torch.Tensor, *, bf16: bool) -> tuple[torch.Tensor, ...]:
    """Return the :func:`factor` tensors that sum to the float32 ``x``: itself, or two in bf16, up to a relative 2⁻¹⁷.

    Two bf16 products cost less than one in float32 only on bf16 hardware.
    """
    if not (bf16 and (_multiplies_bf16(x) or _rounds_to_bf16(x))):
        return (x,)
    high = factor(x, bf16=True)
    low = x - high
    return high, low.bfloat16() if high.dtype == torch.bfloat16 else low  # or rounded when it is multiplied


def _multiplies_bf16(x: torch.Tensor) -> bool:
    """Return True if torch can multiply bf16 tensors of this device into a float32 one."""
    return x.is_cuda and torch.version.hip is None


def _rounds_to_bf16(x: torch.Tensor) -> bool:
    """Return True if torch can multiply float32 tensors in bf16 on this device, and is faster then."""
    return x.device.type == "cpu" and _cpu_multiplies_bf16()


@cache
def _cpu_multiplies_bf16() -> bool:
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()  # torch 2.11 may not have it
    return any(capabilities.get(name) for name in ("amx_bf16", "bf16"))  # of x86 and of Arm


def sum_dtype(p: torch.Tensor) -> torch.dtype:
    """Return the dtype in which gradients of ``p`` are summed and noised: float32 at least."""
    return torch.float32 if p.dtype in HALF else p.dtype


def set_gradient(p: nn.Parameter, grad: torch.Tensor | None) -> None:
    """Set ``p.grad = grad``, in any dtype."""
    if grad is not None and grad.dtype != p.grad_dtype:
        p.grad = None
        p.grad_dtype = grad.dtype
    p.grad = grad
