"""Differentially private fine-tuning for transformers and any PyTorch model."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public names, by the module that holds them.
_ROOMS = {
    "auditing.canaries": "AuditConfig",
    "auditing.estimators": "clopper_pearson_epsilon_lower_bound clopper_pearson_gdp_lower_bound largest_one_run_bound "
    "one_run_epsilon_lower_bound one_run_fdp_epsilon_lower_bound one_run_gdp_lower_bound",
    "auditing.membership": "membership_report",
    "checks.validation": "ModuleValidator register_module_fixer register_module_validator",
    "clipping": "PerExampleClipper check_model check_per_sample_gradients_are_correct register_grad_sampler "
    "register_norm_sampler",
    "data.documents": "first_rows_of_each keep_documents_apart padded_blocks",
    "engine": "PrivacyEngine",
    "losses.example_losses": "find_example_losses",
    "mechanism.accounting": "calibrate_noise_multiplier compute_epsilon register_accountant",
    "mechanism.clipping_functions": "AdaptiveClipping AutomaticClipping FlatClipping NormalisedClipping "
    "PerGroupClipping PerLayerClipping PerSampleAdaptiveClipping ScheduledClipping",
    "mechanism.mechanism": "Mechanism PrivacyUnit Release",
    "mechanism.noise": "BandedInverseNoise BandedNoise BufferedNoise IndependentNoise ScheduledNoise",
    "mechanism.planner": "plan plan_units",
    "mechanism.sampling": "BallsInBinsSampling CyclicPoissonSampling FixedOrderSampling PoissonSampling "
    "RandomAllocationSampling ScheduledPoissonSampling TruncatedPoissonSampling",
    "mechanism.schedules": "ConstantSchedule ExponentialSchedule LinearSchedule StepSchedule",
    "noise.optimizers": "DPAdamW",
    "step.run": "PrivacySpent",
    "trainer": "DPSeq2SeqTrainer DPSeq2SeqTrainingArguments DPTrainer DPTrainerMixin DPTrainingArguments "
    "WeightAverage",
    "trl": "DPDPOConfig DPDPOTrainer DPRewardConfig DPRewardTrainer DPSFTConfig DPSFTTrainer",
}
_WHERE = {name: room for room, names in _ROOMS.items() for name in names.split()}
# Without those of extras: `from dp_transformers import *` must work where these are not installed.
__all__ = [
    "AdaptiveClipping",
    "AuditConfig",
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
    "WeightAverage",
    "calibrate_noise_multiplier",
    "check_model",
    "check_per_sample_gradients_are_correct",
    "clopper_pearson_epsilon_lower_bound",
    "clopper_pearson_gdp_lower_bound",
    "compute_epsilon",
    "find_example_losses",
    "first_rows_of_each",
    "keep_documents_apart",
    "largest_one_run_bound",
    "membership_report",
    "one_run_epsilon_lower_bound",
    "one_run_fdp_epsilon_lower_bound",
    "one_run_gdp_lower_bound",
    "padded_blocks",
    "plan",
    "plan_units",
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
    from .auditing.canaries import AuditConfig
    from .auditing.estimators import (
        clopper_pearson_epsilon_lower_bound,
        clopper_pearson_gdp_lower_bound,
        largest_one_run_bound,
        one_run_epsilon_lower_bound,
        one_run_fdp_epsilon_lower_bound,
        one_run_gdp_lower_bound,
    )
    from .auditing.membership import membership_report
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
    from .mechanism.planner import plan, plan_units
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
    from .trainer import (
        DPSeq2SeqTrainer,
        DPSeq2SeqTrainingArguments,
        DPTrainer,
        DPTrainerMixin,
        DPTrainingArguments,
        WeightAverage,
    )
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
