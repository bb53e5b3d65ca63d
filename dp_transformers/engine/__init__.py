"""PrivacyEngine runs the private step of DPTrainer in a loop of your own."""

from .engine import PrivacyEngine

__all__ = ["PrivacyEngine"]
