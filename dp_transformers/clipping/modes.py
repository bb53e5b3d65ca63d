"""The clipping modes: what a layer's backward does with its terms, and how the clipped sum is formed afterwards.

=============  =====================================  ==================  =================================
mode           norm of a layer                        kept until the end  clipped sum
=============  =====================================  ==================  =================================
book_keeping   ghost or instantiated, by cost         the terms           from the terms (one backward)
ghost          ghost or instantiated, by cost         nothing             second backward, re-weighted loss
fast_gradient  instantiated, a layer at a time        nothing             second backward, re-weighted loss
per_sample     instantiated                           the instances       from the instances
=============  =====================================  ==================  =================================

Sources: book-keeping, Bu et al. 2023 (arXiv 2210.00038); ghost norms, Li et al. 2022 (arXiv 2110.05679); fast gradient
clipping, Lee and Kifer 2021 (arXiv 2009.03106); per-sample gradients, Abadi et al. 2016 (arXiv 1607.00133).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Mode:
    """How norms are measured (`instantiate` always, or by cost) and whether terms are kept for the sum."""

    name: str
    instantiate: bool
    keep: bool


MODES = {
    mode.name: mode
    for mode in (
        Mode("book_keeping", instantiate=False, keep=True),
        Mode("ghost", instantiate=False, keep=False),
        Mode("fast_gradient", instantiate=True, keep=False),
        Mode("per_sample", instantiate=True, keep=True),
    )
}

# In the two-pass modes the gradient that is summed is not the one that was measured: the second pass rounds c·loss anew.
# The coefficient is shrunk by this much so that the sum still respects C.
SECOND_PASS_SLACK = {torch.float64: 0.0, torch.float32: 0.0, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-8}
REDUCED_FP32_SLACK = 2.0**-7  # where fp32 products are allowed to run as TF32 or bf16


def choose_mode(name: str, model: nn.Module) -> Mode:
    """The mode for ``name``; "auto" is book-keeping, and ghost where activations are checkpointed (records would undo that).

    Decided from the model's configuration alone, so every rank decides alike.
    """
    if name == "auto":
        checkpointed = any(
            getattr(m, "gradient_checkpointing", False) is True or hasattr(m, "_checkpoint_wrapped_module") for m in model.modules()
        )
        name = "ghost" if checkpointed else "book_keeping"
    if name not in MODES:
        raise ValueError(f"clipping mode {name!r} is unknown; choose 'auto' or one of {sorted(MODES)}.")
    return MODES[name]
