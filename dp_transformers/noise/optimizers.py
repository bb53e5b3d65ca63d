"""Optimizers that use the variance of the noise in the gradients. This is post-processing, and costs no privacy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..clipping.parallel.dtensor import to_local


class DPAdamW(torch.optim.Optimizer):
    """AdamW with a second moment from which the noise is subtracted.

    Adam divides by the root of v̂, the mean of squared gradients. Noise of variance φ on every coordinate adds φ to it.
    In private training this is most of v̂, so all coordinates are divided by nearly the same number. This optimizer
    subtracts the mean Φ̂ of φ, with the same weights as v̂ (DP-AdamBC, arXiv 2312.14334; with schedules and weight decay
    DP-AdamW-BC, arXiv 2511.07843). Each released gradient carries the φ of its step, also if noise is scheduled or
    correlated over steps. Without noise this is torch's AdamW.

    Steps are longer than those of AdamW at the same ``lr``, often much longer, since the divisor is smaller.

    Args:
        params: Parameters, or groups of them, as for any optimizer of torch.
        lr: The learning rate.
        betas: The decay rates β₁ and β₂ of the means.
        eps: Added to the root.
        weight_decay: Parameters shrink by this times ``lr`` in each step.
        floor: Lower bound of v̂ - Φ̂, as in DP-AdamBC. By default v̂ itself is used where v̂ - Φ̂ is not positive, since
            the root of a small floor would enlarge coordinates that are only noise.

    Raises:
        ValueError: a setting is out of range, or a gradient was not released by a private step.

    Example::

        >>> import torch
        >>> from dp_transformers import DPAdamW, PrivacyEngine
        >>> model, rows = torch.nn.Linear(3, 2), [(torch.randn(3), i % 2) for i in range(100)]
        >>> engine = PrivacyEngine()
        >>> model, optimizer, loader = engine.make_private(
        ...     module=model,
        ...     optimizer=DPAdamW(model.parameters(), lr=1e-3),
        ...     data_loader=torch.utils.data.DataLoader(rows, batch_size=20),
        ...     noise_multiplier=1.0,
        ...     max_grad_norm=1.0,
        ... )
        >>> for x, y in loader:
        ...     optimizer.zero_grad()
        ...     torch.nn.functional.cross_entropy(model(x), y).backward()
        ...     optimizer.step()
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        floor: float | None = None,
    ):
        ranges = {"lr": lr, "eps": eps, "weight_decay": weight_decay, "floor": floor or 0.0}
        if wrong := [f"{name}={value!r}" for name, value in ranges.items() if not value >= 0]:
            raise ValueError(f"{', '.join(wrong)} must not be negative.")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must lie in [0, 1), got {betas!r}.")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "floor": floor}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters with noised gradients, which a private step has released into ``p.grad``."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step(p, p.grad, group)
        return loss

    def _step(self, p: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        variance, state = noise_variance(gradient), self.state[p]
        if not state:
            state |= {"step": 0, "noise": 0.0, "exp_avg": _zeros(p), "exp_avg_sq": _zeros(p)}
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = state[name].float()  # load_state_dict casts to the dtype of the parameter
        beta1, beta2 = group["betas"]
        state["step"] = steps = state["step"] + 1
        state["noise"] = beta2 * state["noise"] + (1 - beta2) * variance
        grad, weights = to_local(gradient).float(), to_local(p)
        mean, square = to_local(state["exp_avg"]), to_local(state["exp_avg_sq"])
        mean.lerp_(grad, 1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        second = square / (1 - beta2**steps)
        left = second - state["noise"] / (1 - beta2**steps)
        if group["floor"] is None:
            left = torch.where(left > 0, left, second)
        else:
            left.clamp_(min=group["floor"])
        update = mean / (1 - beta1**steps) / left.sqrt_().add_(group["eps"])
        weights.mul_(1 - group["lr"] * group["weight_decay"])
        weights.sub_((group["lr"] * update).to(weights.dtype))


def _zeros(p: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(p, dtype=torch.float32)


def set_noise_variance(gradient: torch.Tensor, variance: float) -> None:
    """Record the variance of the noise on each coordinate of a released gradient."""
    gradient.noise_variance = variance  # pyrefly: ignore[missing-attribute]  (tensors take attributes)


def is_noised(gradient: torch.Tensor) -> bool:
    """Return True for a gradient that a private step released, also after changes in place."""
    return hasattr(gradient, "noise_variance")


def noise_variance(gradient: torch.Tensor) -> float:
    """Return the variance of the noise on each coordinate of a gradient.

    Raises:
        ValueError: it was not released by a private step, or is a copy.
    """
    variance = getattr(gradient, "noise_variance", None)
    if variance is None and not to_local(gradient).any():
        return 0.0  # torch makes the state of sharded optimizers by a step with zeros
    if variance is None:
        raise ValueError(
            "DPAdamW needs gradients that a private step released, which carry the variance of their noise. Train "
            "with DPTrainer or PrivacyEngine, and do not replace p.grad; without privacy take torch.optim.AdamW."
        )
    return variance
