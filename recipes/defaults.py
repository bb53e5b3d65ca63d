"""Adapters, epochs and expected batch of a private training, where the flags leave them open.

They follow from the number of examples, the number of trained parameters and the budget, by a rule that was measured
on the texts of docs/before-you-train.md.
"""

from __future__ import annotations

import math
from copy import copy

from fine_tuning import Arguments, ModelArguments

from dp_transformers.mechanism.sampling import steps_of_epochs

MANY = 50_000  # examples
LEAST_EPOCHS = 3
SEEN, MOST_EPOCHS = 25_000, 10  # a training sees so many examples, in at most so many epochs
SEEN_OF_MANY, MOST_EPOCHS_OF_MANY = 1_600_000, 20
LEAST_STEPS = 90
MOST_NOISE = 0.25  # of a step, in clipping bounds
LARGEST_SHARE = 1 / 8  # of the data that a step draws so that it has less noise


def choose_adapters(args: ModelArguments, num_examples: int) -> None:
    """Set what of MiniLM has adapters if --lora_layers is open: query and value of the last two layers, or all linear
    modules of the last one, where many examples make up for the noise of three times as many parameters."""
    if args.lora_layers is None:
        is_large = num_examples >= MANY and args.lora_target_modules == "auto"
        args.lora_layers, args.lora_target_modules = (1, "all-linear") if is_large else (2, args.lora_target_modules)


def choose(args: Arguments, num_examples: int, num_parameters: int) -> str:
    """Set what is open, and return a sentence on it, and on what the rule would change of what is not.

    The batch is the largest power of two that leaves 90 steps, since noise is added once in each step. Where that
    noise is longer than a quarter of the clipping bound, it is a larger one, up to an eighth of the data.
    """
    if args.num_train_epochs is None:
        seen, most = (SEEN, MOST_EPOCHS) if num_examples < MANY else (SEEN_OF_MANY, MOST_EPOCHS_OF_MANY)
        args.num_train_epochs = float(max(LEAST_EPOCHS, min(most, round(seen / num_examples))))
    epochs = args.num_train_epochs if math.isfinite(args.num_train_epochs) else LEAST_EPOCHS

    def noise(batch: float) -> float:
        """σ·√d/B: how long the noise in the mean gradient is."""
        private = copy(args)
        private.without_privacy, private.expected_batch_size = False, batch  # its twin draws as many
        steps = args.max_steps if args.max_steps > 0 else steps_of_epochs(epochs, num_examples, batch)
        sigma = private.mechanism_for(num_examples, steps).at(0).noise_multiplier
        return sigma * math.sqrt(num_parameters) / batch

    by_rule = 2 ** int(math.log2(max(1, min(epochs * num_examples / LEAST_STEPS, num_examples))))
    while 2 * by_rule <= LARGEST_SHARE * num_examples and noise(by_rule) > MOST_NOISE:
        by_rule *= 2
    if args.expected_batch_size_is_derived:
        args.expected_batch_size, args.expected_batch_size_is_derived = by_rule, False
    batch = args.expected_batch_size
    said = f"{num_examples} examples, {num_parameters} trained parameters: {args.num_train_epochs:g} epochs with an "
    said += f"expected batch of {batch}, noise of a step {noise(batch):.2g} C"
    return said if batch == by_rule else f"{said} (by the recipe's rule {by_rule}, {noise(by_rule):.2g} C)"
