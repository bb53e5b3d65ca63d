"""The losses of DPO that depend on one preference each."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from trl import DPOConfig


@dataclass(frozen=True)
class Preferences:
    """The inputs of the losses of B preferences. Each is a pair of (B,) tensors, for chosen and rejected texts.

    Attributes:
        log_ratios: Log-probability by the model minus log-probability by the reference.
        scores: The same under the chosen divergence.
        counts: Number of tokens.
        means: Mean log-probability of the tokens by the model.
    """

    log_ratios: tuple[torch.Tensor, torch.Tensor]
    scores: tuple[torch.Tensor, torch.Tensor]
    counts: tuple[torch.Tensor, torch.Tensor]
    means: tuple[torch.Tensor, torch.Tensor]

    @property
    def margins(self) -> torch.Tensor:
        """(B,) score of the chosen text minus score of the rejected text."""
        return self.scores[0] - self.scores[1]

    @property
    def margins_per_token(self) -> torch.Tensor:
        """(B,) margins of the scores divided by the numbers of tokens."""
        return self.scores[0] / self.counts[0] - self.scores[1] / self.counts[1]


def divergence_score(log_ratios: torch.Tensor, args: DPOConfig) -> torch.Tensor:
    """Return the derivative of the f-divergence at the ratio of probabilities, up to terms that cancel in a pair."""
    kind = args.f_divergence_type
    if kind == "forward_kl":
        return 1 - torch.exp(-log_ratios)
    if kind == "js_divergence":
        return math.log(2) + F.logsigmoid(log_ratios)
    power = args.f_alpha_divergence_coef - 1
    if kind == "alpha_divergence" and abs(power) >= 1e-6:
        return torch.expm1((power * log_ratios).clamp(max=80)) / power
    return log_ratios


def _exo_pair(of: Preferences, args: DPOConfig) -> torch.Tensor:
    """KL divergence of the preferences implied by the model from those of smoothed labels."""
    logits, smoothing = args.beta * of.margins, args.label_smoothing
    won, lost = F.logsigmoid(logits), F.logsigmoid(-logits)
    return won.exp() * (won - math.log1p(-smoothing)) + lost.exp() * (lost - math.log(smoothing))


def _nca_pair(of: Preferences, args: DPOConfig) -> torch.Tensor:
    chosen, rejected = (args.beta * x for x in of.log_ratios)
    return -F.logsigmoid(chosen) - (F.logsigmoid(-chosen) + F.logsigmoid(-rejected)) / 2


def _robust(of: Preferences, args: DPOConfig) -> torch.Tensor:
    """The loss that is unbiased if labels are flipped with probability `label_smoothing`."""
    logits, flipped = args.beta * of.margins, args.label_smoothing
    return (flipped * F.logsigmoid(-logits) - (1 - flipped) * F.logsigmoid(logits)) / (1 - 2 * flipped)


def _sppo_hard(of: Preferences, args: DPOConfig) -> torch.Tensor:
    chosen, rejected = of.log_ratios
    return (chosen - 0.5 / args.beta) ** 2 + (rejected + 0.5 / args.beta) ** 2


def _apo_zero(of: Preferences, args: DPOConfig) -> torch.Tensor:
    chosen, rejected = of.log_ratios
    return 1 - torch.sigmoid(args.beta * chosen) + torch.sigmoid(args.beta * rejected)


def _apo_down(of: Preferences, args: DPOConfig) -> torch.Tensor:
    chosen, rejected = of.log_ratios
    return 1 + torch.sigmoid(args.beta * chosen) - torch.sigmoid(args.beta * (chosen - rejected))


def _discopop(of: Preferences, args: DPOConfig) -> torch.Tensor:
    logits = args.beta * of.margins
    share = torch.sigmoid(logits / args.discopop_tau)
    return share * torch.exp(-logits) - (1 - share) * F.logsigmoid(logits)


# Each returns (B,) losses, each from its own preference.
LOSSES: dict[str, Callable[[Preferences, DPOConfig], torch.Tensor]] = {
    "sigmoid": lambda of, args: -F.logsigmoid(args.beta * of.margins),
    "sigmoid_norm": lambda of, args: -F.logsigmoid(args.beta * of.margins_per_token),
    "hinge": lambda of, args: torch.relu(1 - args.beta * of.margins),
    "ipo": lambda of, args: (of.margins_per_token - 0.5 / args.beta) ** 2,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "robust": _robust,
    "bco_pair": lambda of, args: (
        -F.logsigmoid(args.beta * of.log_ratios[0]) - F.logsigmoid(-args.beta * of.log_ratios[1])
    ),
    "sppo_hard": _sppo_hard,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "discopop": _discopop,
    "sft": lambda of, args: -of.means[0],
}
