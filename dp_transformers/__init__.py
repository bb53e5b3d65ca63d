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
    "trainer": "DPSeq2SeqTrainer DPSeq2SeqTrainingArguments DPTrainer DPTrainerMixin DPTrainingArguments",
    "trainer.weight_average": "WeightAverage",
    "trl": "DPDPOConfig DPDPOTrainer DPRewardConfig DPRewardTrainer DPSFTConfig DPSFTTrainer",
}
_WHERE = {name: room for room, names in _ROOMS.items() for name in names.split()}
# Without those of extras: `from dp_transformers import *` must work where these are not installed.
__all__ = sorted(name for name, room in _WHERE.items() if room != "trl")

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

if TYPE_CHECKING:  # "as" tells type checkers that a name is public
    from .auditing.canaries import AuditConfig as AuditConfig
    from .auditing.estimators import clopper_pearson_epsilon_lower_bound as clopper_pearson_epsilon_lower_bound
    from .auditing.estimators import clopper_pearson_gdp_lower_bound as clopper_pearson_gdp_lower_bound
    from .auditing.estimators import largest_one_run_bound as largest_one_run_bound
    from .auditing.estimators import one_run_epsilon_lower_bound as one_run_epsilon_lower_bound
    from .auditing.estimators import one_run_fdp_epsilon_lower_bound as one_run_fdp_epsilon_lower_bound
    from .auditing.estimators import one_run_gdp_lower_bound as one_run_gdp_lower_bound
    from .auditing.membership import membership_report as membership_report
    from .checks.validation import ModuleValidator as ModuleValidator
    from .checks.validation import register_module_fixer as register_module_fixer
    from .checks.validation import register_module_validator as register_module_validator
    from .clipping import PerExampleClipper as PerExampleClipper
    from .clipping import check_model as check_model
    from .clipping import check_per_sample_gradients_are_correct as check_per_sample_gradients_are_correct
    from .clipping import register_grad_sampler as register_grad_sampler
    from .clipping import register_norm_sampler as register_norm_sampler
    from .data.documents import first_rows_of_each as first_rows_of_each
    from .data.documents import keep_documents_apart as keep_documents_apart
    from .data.documents import padded_blocks as padded_blocks
    from .engine import PrivacyEngine as PrivacyEngine
    from .losses.example_losses import find_example_losses as find_example_losses
    from .mechanism.accounting import calibrate_noise_multiplier as calibrate_noise_multiplier
    from .mechanism.accounting import compute_epsilon as compute_epsilon
    from .mechanism.accounting import register_accountant as register_accountant
    from .mechanism.clipping_functions import AdaptiveClipping as AdaptiveClipping
    from .mechanism.clipping_functions import AutomaticClipping as AutomaticClipping
    from .mechanism.clipping_functions import FlatClipping as FlatClipping
    from .mechanism.clipping_functions import NormalisedClipping as NormalisedClipping
    from .mechanism.clipping_functions import PerGroupClipping as PerGroupClipping
    from .mechanism.clipping_functions import PerLayerClipping as PerLayerClipping
    from .mechanism.clipping_functions import PerSampleAdaptiveClipping as PerSampleAdaptiveClipping
    from .mechanism.clipping_functions import ScheduledClipping as ScheduledClipping
    from .mechanism.mechanism import Mechanism as Mechanism
    from .mechanism.mechanism import PrivacyUnit as PrivacyUnit
    from .mechanism.mechanism import Release as Release
    from .mechanism.noise import BandedInverseNoise as BandedInverseNoise
    from .mechanism.noise import BandedNoise as BandedNoise
    from .mechanism.noise import BufferedNoise as BufferedNoise
    from .mechanism.noise import IndependentNoise as IndependentNoise
    from .mechanism.noise import ScheduledNoise as ScheduledNoise
    from .mechanism.planner import plan as plan
    from .mechanism.planner import plan_units as plan_units
    from .mechanism.sampling import BallsInBinsSampling as BallsInBinsSampling
    from .mechanism.sampling import CyclicPoissonSampling as CyclicPoissonSampling
    from .mechanism.sampling import FixedOrderSampling as FixedOrderSampling
    from .mechanism.sampling import PoissonSampling as PoissonSampling
    from .mechanism.sampling import RandomAllocationSampling as RandomAllocationSampling
    from .mechanism.sampling import ScheduledPoissonSampling as ScheduledPoissonSampling
    from .mechanism.sampling import TruncatedPoissonSampling as TruncatedPoissonSampling
    from .mechanism.schedules import ConstantSchedule as ConstantSchedule
    from .mechanism.schedules import ExponentialSchedule as ExponentialSchedule
    from .mechanism.schedules import LinearSchedule as LinearSchedule
    from .mechanism.schedules import StepSchedule as StepSchedule
    from .noise.optimizers import DPAdamW as DPAdamW
    from .step.run import PrivacySpent as PrivacySpent
    from .trainer import DPSeq2SeqTrainer as DPSeq2SeqTrainer
    from .trainer import DPSeq2SeqTrainingArguments as DPSeq2SeqTrainingArguments
    from .trainer import DPTrainer as DPTrainer
    from .trainer import DPTrainerMixin as DPTrainerMixin
    from .trainer import DPTrainingArguments as DPTrainingArguments
    from .trainer.weight_average import WeightAverage as WeightAverage
    from .trl import DPDPOConfig as DPDPOConfig
    from .trl import DPDPOTrainer as DPDPOTrainer
    from .trl import DPRewardConfig as DPRewardConfig
    from .trl import DPRewardTrainer as DPRewardTrainer
    from .trl import DPSFTConfig as DPSFTConfig
    from .trl import DPSFTTrainer as DPSFTTrainer


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for, so that importing the package loads nothing heavy."""
    if name not in _WHERE:
        if name in _OF_OPACUS:  # "from dp_transformers import ..." hides the text of an AttributeError
            raise ImportError(f"{name} is of Opacus, and not here: {_OF_OPACUS[name]}. (docs/from-opacus.md)")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(_WHERE)}")
    return getattr(import_module(f".{_WHERE[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
