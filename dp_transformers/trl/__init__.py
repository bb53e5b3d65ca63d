"""Private trainers of TRL: supervised fine-tuning, DPO and reward models."""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("trl") is None:
    raise ImportError(
        'the private trainers of TRL need trl, which is not installed. Type: pip install "dp-finetune[trl]"',
        name="trl",
    )

from .preferences import DPDPOConfig, DPDPOTrainer, DPRewardConfig, DPRewardTrainer
from .sft import DPSFTConfig, DPSFTTrainer

__all__ = ["DPDPOConfig", "DPDPOTrainer", "DPRewardConfig", "DPRewardTrainer", "DPSFTConfig", "DPSFTTrainer"]
