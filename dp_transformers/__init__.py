"""Differentially private fine-tuning for transformers and any PyTorch model."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "AdaptiveClipping": "mechanism.clipping_functions",
    "AutomaticClipping": "mechanism.clipping_functions",
    "BallsInBinsSampling": "mechanism.sampling",
    "BandedInverseNoise": "mechanism.noise",
    "BandedNoise": "mechanism.noise",
    "BufferedNoise": "mechanism.noise",
    "ConstantSchedule": "mechanism.schedules",
    "CyclicPoissonSampling": "mechanism.sampling",
    "DPAdamW": "noise.optimizers",
    "DPDPOConfig": "trl",
    "DPDPOTrainer": "trl",
    "DPRewardConfig": "trl",
    "DPRewardTrainer": "trl",
    "DPSFTConfig": "trl",
    "DPSFTTrainer": "trl",
    "DPSeq2SeqTrainer": "trainer",
    "DPSeq2SeqTrainingArguments": "trainer",
    "DPTrainer": "trainer",
    "DPTrainerMixin": "trainer",
    "DPTrainingArguments": "trainer",
    "ExponentialSchedule": "mechanism.schedules",
    "FixedOrderSampling": "mechanism.sampling",
    "FlatClipping": "mechanism.clipping_functions",
    "IndependentNoise": "mechanism.noise",
    "LinearSchedule": "mechanism.schedules",
    "Mechanism": "mechanism.mechanism",
    "ModuleValidator": "checks.validation",
    "NormalisedClipping": "mechanism.clipping_functions",
    "PerExampleClipper": "clipping",
    "PerGroupClipping": "mechanism.clipping_functions",
    "PerLayerClipping": "mechanism.clipping_functions",
    "PerSampleAdaptiveClipping": "mechanism.clipping_functions",
    "PoissonSampling": "mechanism.sampling",
    "PrivacyEngine": "engine",
    "PrivacySpent": "step.run",
    "PrivacyUnit": "mechanism.mechanism",
    "RandomAllocationSampling": "mechanism.sampling",
    "Release": "mechanism.mechanism",
    "ScheduledClipping": "mechanism.clipping_functions",
    "ScheduledNoise": "mechanism.noise",
    "ScheduledPoissonSampling": "mechanism.sampling",
    "StepSchedule": "mechanism.schedules",
    "TruncatedPoissonSampling": "mechanism.sampling",
    "calibrate_noise_multiplier": "mechanism.accounting",
    "check_model": "clipping",
    "check_per_sample_gradients_are_correct": "clipping",
    "compute_epsilon": "mechanism.accounting",
    "find_example_losses": "losses.example_losses",
    "first_rows_of_each": "data.documents",
    "keep_documents_apart": "data.documents",
    "padded_blocks": "data.documents",
    "plan": "mechanism.planner",
    "register_accountant": "mechanism.accounting",
    "register_grad_sampler": "clipping",
    "register_module_fixer": "checks.validation",
    "register_module_validator": "checks.validation",
    "register_norm_sampler": "clipping",
}
# Without those of extras: `from dp_transformers import *` must work where these are not installed.
__all__ = [
    "AdaptiveClipping",
    "AutomaticClipping",
    "BallsInBinsSampling",
    "BandedInverseNoise",
    "BandedNoise",
    "BufferedNoise",
    "ConstantSchedule",
    "CyclicPoissonSampling",
    "DPAdamW",
    "DPSeq2SeqTrainer",
    "DPSeq2SeqTrainingArguments",
    "DPTrainer",
    "DPTrainerMixin",
    "DPTrainingArguments",
    "ExponentialSchedule",
    "FixedOrderSampling",
    "FlatClipping",
    "IndependentNoise",
    "LinearSchedule",
    "Mechanism",
    "ModuleValidator",
    "NormalisedClipping",
    "PerExampleClipper",
    "PerGroupClipping",
    "PerLayerClipping",
    "PerSampleAdaptiveClipping",
    "PoissonSampling",
    "PrivacyEngine",
    "PrivacySpent",
    "PrivacyUnit",
    "RandomAllocationSampling",
    "Release",
    "ScheduledClipping",
    "ScheduledNoise",
    "ScheduledPoissonSampling",
    "StepSchedule",
    "TruncatedPoissonSampling",
    "calibrate_noise_multiplier",
    "check_model",
    "check_per_sample_gradients_are_correct",
    "compute_epsilon",
    "find_example_losses",
    "first_rows_of_each",
    "keep_documents_apart",
    "padded_blocks",
    "plan",
    "register_accountant",
    "register_grad_sampler",
    "register_module_fixer",
    "register_module_validator",
    "register_norm_sampler",
]

# What loops that come from Opacus import, and what does it here.
_OF_OPACUS = {
    "BatchMemoryManager": "give make_private max_physical_batch_size=, and leave the loop as it is",
    "DPDataLoader": "make_private gives back a loader of Poisson draws, and PoissonSampling says what they cost",
    "DPGRU": "train nn.GRU itself",
    "DPLSTM": "train nn.LSTM itself",
    "DPLightningDataModule": "call make_private in configure_optimizers, and give its loader back in train_dataloader",
    "DPMultiheadAttention": "train nn.MultiheadAttention itself",
    "DPOptimizer": "make_private hooks the optimizer that you have; noise of your own is a Noise in a Mechanism",
    "DPRNN": "train nn.RNN itself",
    "DifferentiallyPrivateDistributedDataParallel": "hand over the bare module in every process",
    "GradSampleModule": "PerExampleClipper clips and sums; with mode='per_sample' p.grad_sample is there to be read",
    "GaussianAccountant": "take accountant='pld', or Mechanism(...).epsilon(...)",
    "PRVAccountant": "take accountant='pld', or Mechanism(...).epsilon(...)",
    "RDPAccountant": "take accountant='rdp', or Mechanism(...).epsilon(..., accountant='rdp')",
    "UniformWithReplacementSampler": "PoissonSampling is this scheme",
    "create_accountant": "take PrivacyEngine(accountant=...), or register_accountant for one of your own",
    "get_noise_multiplier": "calibrate_noise_multiplier does this",
}

if TYPE_CHECKING:
    from .checks.validation import ModuleValidator, register_module_fixer, register_module_validator
    from .clipping import (
        PerExampleClipper,
        check_model,
        check_per_sample_gradients_are_correct,
        register_grad_sampler,
        register_norm_sampler,
    )
    from .data.documents import first_rows_of_each, keep_documents_apart, padded_blocks
    from .engine import PrivacyEngine
    from .losses.example_losses import find_example_losses
    from .mechanism.accounting import calibrate_noise_multiplier, compute_epsilon, register_accountant
    from .mechanism.clipping_functions import (
        AdaptiveClipping,
        AutomaticClipping,
        FlatClipping,
        NormalisedClipping,
        PerGroupClipping,
        PerLayerClipping,
        PerSampleAdaptiveClipping,
        ScheduledClipping,
    )
    from .mechanism.mechanism import Mechanism, PrivacyUnit, Release
    from .mechanism.noise import BandedInverseNoise, BandedNoise, BufferedNoise, IndependentNoise, ScheduledNoise
    from .mechanism.planner import plan
    from .mechanism.sampling import (
        BallsInBinsSampling,
        CyclicPoissonSampling,
        FixedOrderSampling,
        PoissonSampling,
        RandomAllocationSampling,
        ScheduledPoissonSampling,
        TruncatedPoissonSampling,
    )
    from .mechanism.schedules import ConstantSchedule, ExponentialSchedule, LinearSchedule, StepSchedule
    from .noise.optimizers import DPAdamW
    from .step.run import PrivacySpent
    from .trainer import DPSeq2SeqTrainer, DPSeq2SeqTrainingArguments, DPTrainer, DPTrainerMixin, DPTrainingArguments
    from .trl import DPDPOConfig, DPDPOTrainer, DPRewardConfig, DPRewardTrainer, DPSFTConfig, DPSFTTrainer  # noqa: F401  (of an extra)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for, so that importing the package loads nothing heavy."""
    if name not in _WHERE:
        if name in _OF_OPACUS:  # "from dp_transformers import ..." hides the text of an AttributeError
            raise ImportError(f"{name} is of Opacus, and not here: {_OF_OPACUS[name]}. (docs/from-opacus.md)")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(_WHERE)}")
    return getattr(import_module(f".{_WHERE[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
