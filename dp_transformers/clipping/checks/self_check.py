"""Two checks before anything is trained: that no parameter escapes, and that what is computed is what is claimed.

* The **canary**: one pass in which the modules of all owners see detached copies of their parameters. Whatever
  gradient still reaches a parameter came by a use that no rule saw: a weight read by a functional call, a
  parametrisation, a module that was bypassed.
* The **self-check**: norms and clipped sum of a small batch against one example at a time through plain autograd, with
  dropout off and the trainable parameters shifted a little; and locality, as trained too: another example's content
  must not move an example's gradient, and no buffer or frozen weight may change.

Both run in float32 wherever the model does, whatever precision it trains in, which is then looked at by itself: norms
and sums, with more tolerance. Where parameters are split over processes, autocast is off, but weights in bf16 stay as
they are.

:func:`self_check` runs both on synthetic input with the shapes, dtypes and masks of the first batch (random ids and
numbers, dropout off, random state restored), so that private data decides nothing; :func:`check_model` runs them on
public data you hand over.
"""

from __future__ import annotations

import contextlib
import logging
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map_with_path

from ...runtime.randomness import forked_generators, random_state
from ..batch_dims import batch_size_of, positions_of
from ..discovery import discover_owners
from ..engine import ClippingEngine
from ..errors import SelfCheckError, UnownedParameterError, UnsupportedModuleError
from ..modes import MODES, choose_mode
from ..owners import reassign_to_parents, warn_about_fallback
from ..ragged import unpacked
from .case import Case
from .causes import draws_in_evaluation, true_causes
from .float32 import in_float32_if_possible
from .locality import locality_as_trained
from .lookups import tables_of_ids
from .reference import TOLERANCE, ClippedSum, clip, distance, errors_against_one_at_a_time, length_of, perturbed
from .spread_numbers import spread_numbers
from .synthetic import (
    LossFunction,
    arguments_of,
    batch_second,
    evaluating,
    has_batch,
    on_packed,
    random_output_loss,
    second_dimension_first,
    synthetic_inputs,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckReport:
    """Worst relative errors of one check: per-example norm, clipped sum (all parameters together), locality, and
    per-example gradient.

    The last is measured where there are such gradients, in mode "per_sample", and 0 elsewhere.
    """

    norm_error: float
    sum_error: float
    locality_error: float
    seconds: float
    gradient_error: float = 0.0


@contextlib.contextmanager
def _attached(model: nn.Module, mode: str) -> Iterator[ClippingEngine]:
    engine = ClippingEngine(model, choose_mode(mode, model))
    engine.attach()
    try:
        yield engine
    finally:
        engine.detach()


def check_model(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    mode: str = "auto",
    loss_function: LossFunction | None = None,
) -> CheckReport:
    """Check on your own (public) batch that clipping is exact for ``model``.

    Args:
        model: The model as it will be trained.
        batch: Keyword arguments of its forward, as a collator gives them, tensors with the batch first, at least two
            examples.
        mode: The clipping mode to check.
        loss_function: ``f(**batch) -> (B,)`` per-example losses; default: a random linear function of every output.

    Returns:
        The worst relative errors seen.

    Raises:
        SelfCheckError: a parameter escapes, or norms, sums or locality are off.

    Example::

        >>> import torch
        >>> from dp_transformers import check_model
        >>> report = check_model(torch.nn.Linear(3, 2), {"input": torch.randn(4, 3)})
        >>> report.norm_error < 1e-5
        True
    """
    with _attached(model, mode) as engine:
        return run_checks(engine, *arguments_of(batch), loss_function)


def check_per_sample_gradients_are_correct(
    inputs: Any,
    module: nn.Module,
    *,
    modes: Sequence[str] = tuple(MODES),
    tolerance: float = 1e-5,
    loss_function: LossFunction | None = None,
) -> bool:
    """Check that per-example gradients, norms and clipped sums of ``module`` equal one example at a time, in every
    mode.

    For your own layers and rules; :func:`check_model` raises instead and returns the figures. They are logged here,
    the reason of a refusal as a warning.

    Args:
        inputs: The module's input: a tensor, a tuple of positional or a dict of keyword arguments, the batch first, at
            least two examples.
        module: What to check, not attached to a clipper; left as it is.
        modes: The clipping modes to check.
        tolerance: Largest relative error accepted: of each example's norm and gradient, and of the clipped sum, over
            all parameters together.
        loss_function: As of :func:`check_model`.

    Returns:
        False if an error is larger, examples influence each other, or a parameter is out of reach.

    Raises:
        ValueError: fewer than two examples, or nothing to train.

    Example::

        >>> import torch
        >>> from dp_transformers import check_per_sample_gradients_are_correct
        >>> check_per_sample_gradients_are_correct(torch.randn(4, 3), torch.nn.Linear(3, 2))
        True
    """

    args, kwargs = arguments_of(inputs)
    for mode in modes:
        try:
            with _attached(module, mode) as engine:
                report = run_checks(engine, args, kwargs, loss_function)
        except (SelfCheckError, UnsupportedModuleError) as error:
            logger.warning("mode %s: %s", mode, error)
            return False
        figures = (report.gradient_error, report.norm_error, report.sum_error)
        right = max(figures) <= tolerance
        logger.log(
            logging.INFO if right else logging.WARNING,
            "mode %s: worst relative error of per-example gradients %.1e, norms %.1e, of the clipped sum %.1e "
            "(allowed: %.0e)",
            mode, *figures, tolerance,
        )  # fmt: skip
        if not right:
            return False
    return True


def self_check(
    engine: ClippingEngine, args: tuple, kwargs: dict, loss_function: LossFunction | None = None
) -> CheckReport:
    """Both checks on synthetic input shaped like ``args`` and ``kwargs``."""
    try:
        with forked_generators(engine.trainable.device):
            engine.trainable.parallel.require_same((args, kwargs), random_state(engine.trainable.device))
            given: tuple[tuple, dict] = engine.trainable.shards.broadcast_inputs(
                (args, kwargs), engine.trainable.device
            )
            given = unpacked(engine.model, *given)
            if engine.trainable.shards or engine.trainable.parallel:
                torch.manual_seed(0)  # processes that share parameters must take the same decisions
            if not engine.batch_first:
                given = second_dimension_first(*given)
                loss_function = batch_second(loss_function or random_output_loss(engine.model, batch_first=False))
            draw = partial(
                synthetic_inputs, engine.model, *given, table_of=tables_of_ids(engine, loss_function, *given)
            )
            report = run_checks(engine, *draw(), loss_function, draw)
    except BaseException as error:
        engine.trainable.shards.recover()
        if _is_about_the_input(error):
            raise SelfCheckError(
                "the self-check runs the model and its loss on random numbers with the shapes of a batch, for another "
                f"number of examples, and there they raised {type(error).__name__}: "
                f"{str(error).splitlines()[0] if str(error) else 'no text'}. Every tensor that the model is given "
                "must have the examples in its first dimension: make initial states of a recurrent layer inside of "
                "forward, pack sequences with enforce_sorted=False, and stack lists of tensors. Targets are drawn "
                "within their range where they are called labels: name them so (for DPTrainer in label_names of the "
                "arguments), or compute the loss outside of the model. Where the model takes no random input, "
                "self_check=False leaves the check out, and the run then says verified: false."
            ) from error
        raise
    logger.info(
        "self-check passed in %.2f s: every trainable parameter is covered; worst relative error of per-example norms "
        "%.1e, of the clipped sum %.1e, locality %.1e",
        report.seconds, report.norm_error, report.sum_error, report.locality_error,
    )  # fmt: skip
    return report


def _is_about_the_input(error: BaseException) -> bool:
    """Whether it is an error of torch, of the model or of the loss, about an input that is not as it should be."""
    if isinstance(error, (IndexError, AssertionError)):
        return True
    if type(error) is not RuntimeError or error.__traceback__ is None:
        return False
    *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
    return not innermost.f_globals.get("__name__", "").startswith("dp_transformers.")


def run_checks(
    engine: ClippingEngine,
    args: tuple,
    kwargs: dict,
    loss_function: LossFunction | None = None,
    draw: Callable[[int], tuple[tuple, dict]] | None = None,
) -> CheckReport:
    """Canary, exactness and locality on exactly this input. Gradients, training mode and the clipping bound are left
    as they were.

    The errors reported are those in float32, where the model runs in it. ``draw(rows)`` gives arguments like these
    of so many other examples; default: these examples again.
    """
    start = time.perf_counter()
    args, kwargs = unpacked(engine.model, args, kwargs)
    losses_of = on_packed(loss_function or random_output_loss(engine.model))
    batch = batch_size_of(engine.model, args, kwargs)
    if batch < 2:
        raise ValueError("the check needs at least two examples: locality cannot be seen with one.")
    case = Case(engine, losses_of, args, kwargs, batch, draw)
    in_float32 = case.in_float32()
    with engine.trial(), true_causes(case):
        errors, replaced = in_float32_if_possible(engine, in_float32.only([0]).losses, lambda: _compare(in_float32))
        if replaced or errors is None:
            as_trained = _compare(case, locality=errors is None)
            errors = errors or as_trained
    warn_about_fallback(engine.owners)
    norm_error, sum_error, locality_error, gradient_error = errors
    return CheckReport(norm_error, sum_error, locality_error, time.perf_counter() - start, gradient_error)


def _compare(case: Case, *, locality: bool = True) -> tuple[float, float, float, float]:
    """Worst errors of norms, sums, locality and per-example gradients, in the precision that this runs in; raises if
    one is too large.

    The model is evaluating, so that it draws no random numbers. One that draws some there, too, is given the same for
    an example alone as in its batch. One that cannot be checked so may do something else there than in training (read
    a weight otherwise, refuse to go backward), and is checked as it trains.

    Low precision adds nothing to what is known of locality, so it need not be looked at twice.
    """
    engine, compare = case.engine, partial(_compare_in, case=case, locality=locality)
    try:
        return compare(evaluating)
    except torch.OutOfMemoryError:
        raise
    except SelfCheckError:
        if not draws_in_evaluation(case):
            raise
        engine.begin_anew()
        return compare(partial(_evaluating_with_same_numbers, batch=case.batch))
    except Exception as error:
        if not _can_be_checked_in_training(engine):
            raise
        engine.begin_anew()
        try:
            return compare(contextlib.nullcontext)
        except SelfCheckError as in_training:
            if isinstance(error, UnsupportedModuleError):
                raise error from None
            raise in_training from error
        except Exception:
            raise error from None


@contextlib.contextmanager
def _evaluating_with_same_numbers(model: nn.Module, batch: int) -> Iterator[None]:
    """Inside, the model is evaluating, and an example alone is given the random numbers that it has in its batch."""
    with evaluating(model), spread_numbers({1, batch}, reordered=True) as draws_no_others:
        yield
        if not draws_no_others():
            raise SelfCheckError(
                f"{type(model).__name__} draws random numbers in evaluation too, and in a way (a permutation, "
                "integers, a generator of Python or NumPy) in which an example alone cannot be given those that it "
                "has in a batch, so that the two cannot be compared. Draw them in training alone "
                "('if self.training:' around the draw)."
            )


def _can_be_checked_in_training(engine: ClippingEngine) -> bool:
    """Returns False where statistics of the batch would be the reason of every failure, and where a pass of this
    process's own would leave others waiting."""
    mixes = any(isinstance(m, _BatchNorm) and m.training for m in engine.model.modules())
    return engine.model.training and not (mixes or engine.trainable.shards or engine.trainable.parallel)


def _compare_in(
    mode: Callable[[nn.Module], contextlib.AbstractContextManager], case: Case, locality: bool
) -> tuple[float, float, float, float]:
    """:func:`_compare` with the model in this mode."""
    engine = case.engine

    def clipped_sum() -> ClippedSum:
        return clip(engine, case.losses)

    with perturbed(engine):  # a rule behind a weight that starts at zero (LoRA's B) would see no gradient
        with mode(engine.model):
            clipped = _until_all_can_be_run(engine, lambda: _discover(case), clipped_sum)
        locality_error, error_as_trained = 0.0, 0.0
        if locality:
            locality_error, error_as_trained = locality_as_trained(case)
        if not bool(torch.isfinite(clipped.norms_b).all()):
            raise SelfCheckError(
                "the gradient of an example of random numbers is not finite, so nothing can be checked. Look for nan "
                "and inf in the weights (a model built on 'meta' or by torch.empty is not initialised: load or "
                "initialise it), and for a layer or loss that needs other inputs than normally distributed ones (a "
                "logarithm or square root of features: take it before the model)."
            )
        tolerance = TOLERANCE[clipped.low_precision]
        _require_equal_replicas(engine, clipped.total, tolerance)
        with mode(engine.model):
            _require_same_with_all_kept(case, clipped, tolerance)
            errors = errors_against_one_at_a_time(case, clipped)
    norm_error, sum_error, gradient_error = errors
    if not all(error <= tolerance for error in errors):
        raise SelfCheckError(
            f"clipping is not exact for {type(engine.model).__name__} in mode '{engine.mode.name}': relative error of "
            f"per-example norms {norm_error:.1e}, of the clipped sum {sum_error:.1e}, of per-example gradients "
            f"{gradient_error:.1e} (allowed {tolerance:.0e}) against one example at a time. "
            "Either the model or its loss mixes examples: ModuleValidator.find_mixing(model, batch), on public "
            "examples, names the module, and a loss must be averaged within each example alone. Or it cannot be "
            "checked in evaluation, and draws random numbers in training. Or a rule is wrong for a module, or a "
            "module runs a backward pass inside its own (a checkpoint that is not torch's): freeze "
            "the modules that are not of torch or transformers one after the other until this passes, and report the "
            "one that it was."
        )
    if not error_as_trained <= tolerance:
        raise SelfCheckError(
            f"in training mode the sum of the examples' gradients is off by {error_as_trained:.1e} (relative) for "
            f"{type(engine.model).__name__} in mode '{engine.mode.name}', and in evaluation it is right: a module "
            "does something in training alone that no rule knows (it asks whether a tensor needs a gradient, or keeps "
            "something for the loss beside what it returns). Freeze the modules that are not of torch or transformers "
            "one after the other until this passes, and change the one that it was."
        )
    return norm_error, sum_error, locality_error, gradient_error


def _require_same_with_all_kept(case: Case, clipped: ClippedSum, tolerance: float) -> None:
    """Raise SelfCheckError if a ``memory_budget`` would change the sum, which is formed in another way where more is
    kept. How much that is differs between batches, so none and all of it are looked at."""
    engine = case.engine
    if engine.memory is None:
        return
    with engine.keeping_all():
        kept = clip(engine, case.losses)
    error = float(distance(kept.total, clipped.total) / length_of(clipped.total).clamp(min=1e-12))
    if not error <= tolerance:
        raise SelfCheckError(
            f"with a memory_budget clipping is not exact for {type(engine.model).__name__}: the clipped sum of "
            f"what is kept of each layer differs by {error:.1e} (relative, allowed {tolerance:.0e}) from that of mode "
            f"'{engine.mode.name}'. A rule of your own (register_grad_sampler) gives wrong gradients of the right "
            "norms, or a module does: correct it, or leave memory_budget out."
        )


def _require_equal_replicas(engine: ClippingEngine, total: list[torch.Tensor], tolerance: float) -> None:
    if differing := engine.trainable.parallel.differing(engine.trainable.parameters, total, tolerance):
        name = next(
            name for name, p in engine.model.named_parameters() if p is engine.trainable.parameters[differing[0]]
        )
        raise SelfCheckError(
            f"every process of the tensor-parallel group holds parameter '{name}', but their gradients differ: each "
            "sees a part of what it is used on, and nobody adds them up. Give its module the plan's style "
            "'replicated_with_grad_allreduce', or freeze it."
        )


def _until_all_can_be_run(
    engine: ClippingEngine, discover: Callable[[], None], run: Callable[[], ClippedSum]
) -> ClippedSum:
    """Discover the owners, let the parents own what modules hold that turn out not to be re-runnable, and return what
    ``run`` gives at last. Where the parents are not either, the error is that of the module that began it."""
    first: UnsupportedModuleError | None = None
    while True:
        discover()
        try:
            return run()
        except UnsupportedModuleError as error:
            engine.trainable.shards.recover()
            engine.trainable.thaw()
            is_parent = any(owner.module is error.module and owner.covers_children for owner in engine.owners)
            first = first if is_parent and first else error
            try:
                reassign_to_parents(engine.model, engine.owners, error.module)
            except UnownedParameterError:
                raise first from (None if first is error else error)


def _discover(case: Case) -> None:
    """Discover the owners on this input, so that every use of every parameter is seen by a module whose outputs have a
    batch."""
    engine, args, kwargs, batch = case.engine, case.args, case.kwargs, case.batch
    taken = {n for x in tree_leaves((args, kwargs)) if has_batch(x, batch) for n in x.shape[1:]}
    size, other_size, *_ = (n for n in range(3, 3 + 2 * len(taken) + 4, 2) if n not in taken)
    cases = {n: case.others(n) for n in (size, other_size)}

    def plain(size: int, is_padded: bool) -> torch.Tensor:
        given = _padded(cases[size]) if is_padded else cases[size]
        with engine.suspended():
            return given.losses()

    def tapped() -> None:
        engine.install_hooks()
        try:
            cases[size].losses()
        except BaseException:
            engine.trainable.shards.recover()
            raise

    try:
        # positions are not looked for where they come before the examples: flattened rows would not lie example by
        # example
        positions = positions_of(args, kwargs, batch) if engine.batch_first else set()
        discover_owners(
            engine.model,
            engine.owners,
            engine.trainable.parameters,
            plain,
            tapped,
            (size, other_size),
            positions,
            engine.trainable.shards,
        )
    except UnownedParameterError as error:
        raise SelfCheckError(str(error)) from None
    finally:
        engine.forget()
        engine.install_hooks()


def _padded(case: Case) -> Case:
    """The first example's masks end a position earlier, so that a model which drops padding before it computes is seen
    to do so."""

    def make(path: tuple, x: Any) -> Any:
        if not has_batch(x, case.batch) or x.dim() < 2 or "mask" not in str(getattr(path[-1], "key", "")):
            return x
        x = x.clone()
        x[0, ..., -1] = 0
        return x

    return case.on(tree_map_with_path(make, (case.args, case.kwargs)))
