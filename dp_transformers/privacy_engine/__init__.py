"""PrivacyEngine: the private step of DPTrainer for a loop of your own."""

from .engine import PrivacyEngine

__all__ = ["PrivacyEngine"]
