"""Two checks before anything is trained: that no parameter escapes, and that what is computed is what is claimed.

* The **canary**: one pass in which every claimed module sees detached copies of its parameters. Whatever gradient still reaches a
  parameter came by a use that no rule saw: a weight read by a functional call, a parametrisation, a module that was bypassed.
* The **self-check**: norms and clipped sum of a small batch against one example at a time through plain autograd, with dropout off and
  the trainable parameters shifted a little; and locality, as trained too: another example's content must not move an example's gradient,
  and no buffer or frozen weight may change.

Both run in float32 wherever the model does, whatever precision it trains in, which is then looked at by itself: norms and sums, with more
tolerance. Where parameters are split over processes, autocast is off, but weights in bf16 stay as they are.

:func:`self_check` runs both on synthetic input with the shapes, dtypes and masks of the first batch (random ids and numbers, dropout
off, random state restored), so that private data decides nothing; :func:`check_model` runs them on public data you hand over.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_with_path

from ..randomness import _forked_rng, global_state, random_state, set_global_state
from .claims import announce, give_up, settle
from .errors import SelfCheckError, UnclaimedParameterError, UnsupportedModuleError
from .graph import dtypes_in_graph
from .layout import batch_size_of, positions_of
from .modes import MODES
from .parallel.dtensor import everywhere, like, local
from .precision import HALF, full_products, product_settings, sum_dtype, without_autocast

if TYPE_CHECKING:
    from .clipper import PerExampleClipper

logger = logging.getLogger(__name__)

# Largest relative error accepted, by the lowest precision seen in the forward pass. A rule that is wrong by 1% is caught in fp32, which is
# where exactness and locality are decided: in bf16 a model may attend over the whole batch and stay below the error of its rounding.
PADDING_TOLERANCE = 1e-4  # in full fp32, where padding changes a gradient by 1e-7 if it leaves it alone
TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 3e-2}


@dataclass(frozen=True)
class CheckReport:
    """Worst relative errors of one check: per-example norm, clipped sum (all parameters together), locality, and per-example gradient.

    The last is measured where there are such gradients, in mode "per_sample", and 0 elsewhere.
    """

    norm_error: float
    sum_error: float
    locality_error: float
    seconds: float
    gradient_error: float = 0.0


LossFunction = Callable[..., torch.Tensor]  # (*args, **kwargs of the model) -> (B,) losses


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
        batch: Keyword arguments of its forward, as a collator gives them, tensors with the batch first, at least two examples.
        mode: The clipping mode to check.
        loss_function: ``f(**batch) -> (B,)`` per-example losses; default: a random linear function of every output.

    Returns:
        The worst relative errors seen.

    Raises:
        SelfCheckError: a parameter escapes, or norms, sums or locality are off.
    """
    from .clipper import PerExampleClipper

    with PerExampleClipper(model, max_grad_norm=1.0, mode=mode, self_check=False) as clipper:
        return run_checks(clipper, *_arguments(batch), loss_function)


def check_per_sample_gradients_are_correct(
    inputs: Any,
    module: nn.Module,
    *,
    modes: Sequence[str] = tuple(MODES),
    tolerance: float = 1e-5,
    loss_function: LossFunction | None = None,
) -> bool:
    """Whether per-example gradients, norms and clipped sums of ``module`` equal one example at a time, in every mode.

    For your own layers and rules; :func:`check_model` raises instead and returns the figures. They are logged here, the reason of a
    refusal as a warning.

    Args:
        inputs: The module's input: a tensor, a tuple of positional or a dict of keyword arguments, the batch first, at least two examples.
        module: What to check, not attached to a clipper; left as it is.
        modes: The clipping modes to check.
        tolerance: Largest relative error accepted: of each example's norm and gradient, and of the clipped sum, over all parameters together.
        loss_function: As of :func:`check_model`.

    Returns:
        False if an error is larger, examples influence each other, or a parameter is out of reach.

    Raises:
        ValueError: fewer than two examples, or nothing to train.
    """
    from .clipper import PerExampleClipper

    args, kwargs = _arguments(inputs)
    for mode in modes:
        try:
            with PerExampleClipper(module, max_grad_norm=1.0, mode=mode, self_check=False) as clipper:
                report = run_checks(clipper, args, kwargs, loss_function)
        except (SelfCheckError, UnsupportedModuleError) as error:
            logger.warning("mode %s: %s", mode, error)
            return False
        figures = (report.gradient_error, report.norm_error, report.sum_error)
        right = max(figures) <= tolerance
        logger.log(
            logging.INFO if right else logging.WARNING,
            "mode %s: worst relative error of per-example gradients %.1e, norms %.1e, of the clipped sum %.1e (allowed: %.0e)",
            mode, *figures, tolerance,
        )  # fmt: skip
        if not right:
            return False
    return True


def self_check(clipper: PerExampleClipper, args: tuple, kwargs: dict, loss_function: LossFunction | None = None) -> CheckReport:
    """Both checks on synthetic input shaped like ``args`` and ``kwargs``; marks the clipper as checked."""
    clipper.checked = True  # the passes below must not check themselves
    try:
        with _forked_rng(clipper.device):
            clipper.parallel.require_same((args, kwargs), random_state(clipper.device))
            given = clipper.shards.agreed((args, kwargs), clipper.device)
            if clipper.shards or clipper.parallel:
                torch.manual_seed(0)  # processes that share parameters must take the same decisions
            if not clipper.batch_first:
                given = _second_dimension_first(*given)
                loss_function = _batch_second(loss_function or _random_output_loss(clipper.model, batch_first=False))
            args, kwargs = synthetic_inputs(clipper.model, *given)
            report = run_checks(clipper, args, kwargs, loss_function, lambda rows: synthetic_inputs(clipper.model, *given, rows))
    except BaseException:
        clipper.checked = False
        clipper.shards.recover()
        raise
    logger.info(
        "self-check passed in %.2f s: every trainable parameter is covered; worst relative error of per-example norms %.1e, "
        "of the clipped sum %.1e, locality %.1e",
        report.seconds, report.norm_error, report.sum_error, report.locality_error,
    )  # fmt: skip
    return report


def check_padding(
    clipper: PerExampleClipper,
    args: tuple,
    kwargs: dict,
    own_bt: torch.Tensor,
    loss_function: LossFunction | None = None,
    row: int | None = None,
) -> float:
    """Whether an example's gradient is the same with and without its padding, on synthetic input shaped and padded like the given one.

    Where examples are padded to the length of others, one that is not lets those decide its gradient. Looked at in float32.

    Args:
        clipper: Attached to the model as it trains.
        args: Positional arguments of the model, tensors with the batch first. Those that have T in a later dimension are cut to the example's
            own positions; where they are padding, they keep the numbers they have.
        kwargs: Keyword arguments likewise. Lengths, integers of shape (B,), stay true.
        own_bt: (B, T), or (B, ..., T), of which one is enough: which positions are each example's own, as a mask says or lengths do.
        loss_function: As of :func:`check_model`; default: a random linear function of every output at the example's own positions.
        row: Of which example; default: the longest that has padding.

    Returns:
        The relative change of its gradient; 0 where nothing is padded.

    Raises:
        SelfCheckError: padding changes it, or the model cannot compute the example without.
    """
    if not clipper.checked:
        self_check(clipper, args, kwargs, loss_function)
    losses_of = loss_function or _random_output_loss(clipper.model, batch_first=clipper.batch_first)
    if not clipper.batch_first:
        (args, kwargs), losses_of = _second_dimension_first(args, kwargs), _batch_second(losses_of)
    shape, own_bt = own_bt.shape, own_bt.bool().flatten(1, -2).any(1) if own_bt.dim() > 2 else own_bt.bool()
    if row is None:
        count_b = own_bt.sum(1)
        row = int(count_b.masked_fill(count_b == own_bt.shape[1], 0).argmax())
    own_t = own_bt[row]
    if own_t.all() or not own_t.any():
        return 0.0
    with _forked_rng(clipper.device), _undisturbed(clipper), _evaluating(clipper.model):
        if clipper.shards or clipper.parallel:
            torch.manual_seed(0)
        padded, alone = _with_and_without_padding(clipper.model, args, kwargs, own_bt, row, shape)
        with clipper._suspended():
            losses_of(*padded[0], **padded[1])  # what raises here has nothing to do with padding

        given = None if loss_function is None else losses_of
        found, _ = _in_float32_if_possible(
            clipper, losses_of, padded, lambda: _change_by_padding(clipper, given, _with_float32(padded), _with_float32(alone), own_t)
        )
        change, low_precision = found or _change_by_padding(clipper, given, padded, alone, own_t)
    tolerance = PADDING_TOLERANCE if found else TOLERANCE[low_precision]
    if not change <= tolerance:
        first, last = bool(own_t[0]), bool(own_t[-1])
        side = {(True, False): "on the right", (False, True): "on the left", (True, True): "inside", (False, False): "on both sides"}
        raise SelfCheckError(
            f"an example's gradient changes by {change:.1e} (relative) when it is padded {side[first, last]} to the length of a longer one of its "
            "batch, so every example has a say in the gradients of others, beyond the clipping bound. Pad on the other side (padding_side of the "
            "tokenizer), or pad all examples to one length (padding='max_length'), or leave padding out in a per-example loss of your own; "
            "a recurrent model: pack its input (pack_padded_sequence), or read its states at each example's last own position."
        )
    return change


def _change_by_padding(
    clipper: PerExampleClipper, loss_function: LossFunction | None, padded: tuple, alone: tuple, own_t: torch.Tensor
) -> tuple[float, torch.dtype]:
    """How much (relative) one example's gradient differs between these inputs, and the lowest precision seen."""
    with _perturbed(clipper):
        clipper._max_grad_norm = float("inf")
        try:
            losses_of = loss_function or _own_output_loss(clipper, alone, own_t)
            without = _clip(clipper, losses_of, *alone)[1]
        except (RuntimeError, ValueError, IndexError) as error:
            raise SelfCheckError(
                f"an example with {int(own_t.sum())} positions of its own, padded to {len(own_t)}, cannot be computed without the padding "
                f"({str(error).splitlines()[0]}), so nobody knows what the padding does to its gradient. Leave out examples that are so short, or "
                "pad all to one length (padding='max_length')."
            ) from error
        _, with_padding, low_precision = _clip(clipper, losses_of, *padded)
        return float(_distance(with_padding, without) / _length(without).clamp(min=1e-12)), low_precision


def _with_and_without_padding(
    model: nn.Module, args: tuple, kwargs: dict, own_bt: torch.Tensor, row: int, shape: torch.Size
) -> tuple[tuple, tuple]:
    """Synthetic arguments for this row, with the padding it has, and without; a label wherever there may be one."""
    (size, length), own_t, count_b = own_bt.shape, own_bt[row], own_bt.sum(1)
    own_targets = getattr(getattr(model, "config", None), "is_encoder_decoder", False)  # with a length of their own
    name_of = _names_of(model)

    def position_dims(path: tuple, x: torch.Tensor) -> list[int]:
        name, dims = name_of(path), [d for d in range(1, x.dim()) if x.shape[d] == length]
        if _is_of_targets(name) and (own_targets or x.is_floating_point()):  # several classes may happen to be as many as positions
            return []
        if x.shape == shape:
            return dims[-1:]
        return dims if "mask" in name or x.dtype == torch.bool else dims[:1]

    def is_of_lengths(path: tuple, x: torch.Tensor) -> bool:
        if x.dim() != 1 or len(x) != size or x.is_floating_point() or x.dtype == torch.bool or _is_of_targets(name_of(path)):
            return False
        return "length" in name_of(path) or bool((x == count_b.to(x.device)).all()) or bool((x == length).all())

    def in_place(path: tuple, given: Any, drawn: Any) -> Any:
        if not isinstance(given, torch.Tensor) or not given.dim():
            return drawn
        given_row = given[row : row + 1] if len(given) == size else given
        if is_of_lengths(path, given):
            return given_row
        if _is_of_targets(name_of(path)) and position_dims(path, given):
            drawn = drawn.masked_fill(drawn == -100, 1)
        for dim in position_dims(path, given):
            drawn = drawn.where(own_t.to(drawn.device).view([-1 if d == dim else 1 for d in range(drawn.dim())]), given_row)
        return drawn

    def own_positions(path: tuple, given: Any, x: Any) -> Any:
        if not isinstance(given, torch.Tensor) or not given.dim():
            return x
        if is_of_lengths(path, given):
            return x.where(x != length, own_t.sum().to(x))
        for dim in position_dims(path, given):
            x = x.index_select(dim, own_t.nonzero().flatten().to(x.device))
        return x

    given = args, kwargs
    drawn = synthetic_inputs(model, *tree_map(lambda x: x[row : row + 1] if _batched(x, size) else x, given), 1)
    padded = tree_map_with_path(in_place, given, drawn)
    return padded, tree_map_with_path(own_positions, given, padded)


def _own_output_loss(clipper: PerExampleClipper, alone: tuple, own_t: torch.Tensor) -> LossFunction:
    """A loss for models whose own is not known, of what they put out for ``alone``, and of as much of it where there is padding too."""

    def outputs(args: tuple, kwargs: dict) -> list[torch.Tensor]:
        args, kwargs = (args, kwargs) if clipper.batch_first else _second_dimension_first(args, kwargs)
        return _outputs_by_example(clipper.model, args, kwargs, batch_first=clipper.batch_first)

    with clipper._suspended():
        shapes = [x.shape for x in outputs(*alone)]

    def own(x: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        for dim, (size, wanted) in enumerate(zip(x.shape, shape, strict=True)):
            if size == len(own_t) != wanted:
                x = x.index_select(dim, own_t.nonzero().flatten().to(x.device))
            elif size != wanted:  # of fewer positions than the input has, as convolutions make
                x = x.narrow(dim, 0 if own_t[0] else size - wanted, wanted)
        return x

    def losses_of(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensors = outputs(args, kwargs)
        return _projected([own(x, shape) for x, shape in zip(tensors, shapes, strict=True)])

    return losses_of


def _is_of_targets(name: str) -> bool:
    return "label" in name or name.startswith("decoder")


def run_checks(
    clipper: PerExampleClipper,
    args: tuple,
    kwargs: dict,
    loss_function: LossFunction | None = None,
    others: Callable[[int], tuple[tuple, dict]] | None = None,
) -> CheckReport:
    """Canary, exactness and locality on exactly this input. Gradients, training mode and the clipping bound are left as they were.

    The errors reported are those in float32, where the model runs in it. ``others(rows)`` gives other inputs like these for claims to settle on; default: these examples again.
    """
    start = time.perf_counter()
    losses_of = loss_function or _random_output_loss(clipper.model)
    batch = batch_size_of(clipper.model, args, kwargs)
    if batch < 2:
        raise ValueError("the check needs at least two examples: locality cannot be seen with one.")
    others = others or (lambda rows: _recycled(args, kwargs, batch, rows))
    with _undisturbed(clipper), _true_causes(clipper, losses_of, args, kwargs, batch):
        inputs = _with_float32((args, kwargs))
        errors, replaced = _in_float32_if_possible(
            clipper, losses_of, inputs, lambda: _compare(clipper, losses_of, *inputs, batch, lambda rows: _with_float32(others(rows)))
        )
        if replaced or errors is None:
            as_trained = _compare(clipper, losses_of, args, kwargs, batch, others, locality=errors is None)
    errors = errors or as_trained
    announce(clipper.claims)
    norm_error, sum_error, locality_error, gradient_error = errors
    return CheckReport(norm_error, sum_error, locality_error, time.perf_counter() - start, gradient_error)


def _compare(
    clipper: PerExampleClipper,
    losses_of: LossFunction,
    args: tuple,
    kwargs: dict,
    batch: int,
    others: Callable[[int], tuple[tuple, dict]],
    *,
    locality: bool = True,
) -> tuple[float, float, float, float]:
    """Worst errors of norms, sums, locality and per-example gradients, in the precision that this runs in; raises if one is too large.

    Low precision adds nothing to what is known of locality, so it need not be looked at twice.
    """
    with _perturbed(clipper):  # a rule behind a weight that starts at zero (LoRA's B) would see no gradient
        with _evaluating(clipper.model):
            _settle_and_run(clipper, losses_of, args, kwargs, batch, others)
        locality_error = _check_locality_as_trained(clipper, losses_of, args, kwargs, batch) if locality else 0.0
        with _evaluating(clipper.model):
            norms_b = _clip(clipper, losses_of, args, kwargs)[0]
            if not bool(torch.isfinite(norms_b).all()):
                raise SelfCheckError("the gradient of a random example is not finite, so nothing can be checked: is the model initialised?")
            clipper._max_grad_norm = float(norms_b.median()) or 1.0  # so that some are clipped and some are not
            norms_b, total, low_precision = _clip(clipper, losses_of, args, kwargs)
            samples = [getattr(p, "grad_sample", None) for p in clipper.parameters]
            tolerance = TOLERANCE[low_precision]
            _require_equal_replicas(clipper, total, tolerance)
            if locality:
                locality_error = max(locality_error, _locality_error(clipper, losses_of, args, kwargs, batch, norms_b))
                _require_locality(locality_error, tolerance)
            single_b, reference, gradient_error = _one_at_a_time(clipper, losses_of, args, kwargs, batch, samples)
    norm_error = float(((norms_b - single_b).abs() / single_b.clamp(min=1e-12)).max())
    sum_error = float(_distance(total, reference) / _length(reference).clamp(min=1e-12))
    if not max(norm_error, sum_error, gradient_error) <= tolerance:
        raise SelfCheckError(
            f"clipping is not exact for {type(clipper.model).__name__} in mode '{clipper.mode.name}': relative error of per-example norms "
            f"{norm_error:.1e}, of the clipped sum {sum_error:.1e}, of per-example gradients {gradient_error:.1e} (allowed {tolerance:.0e}) "
            "against one example at a time. "
            "Either the model or its loss mixes examples, or a rule is wrong for it: freeze what is unusual, or report the model."
        )
    return norm_error, sum_error, locality_error, gradient_error


@contextlib.contextmanager
def _true_causes(clipper: PerExampleClipper, losses_of: LossFunction, args: tuple, kwargs: dict, batch: int) -> Iterator[None]:
    """Where a check fails for a reason that people know by another name, it is said by that name."""
    try:
        yield
    except Exception as error:
        if clipper.shards or clipper.parallel or not clipper.batch_first:  # where a pass of this process's own would leave others waiting
            raise
        dims, wrong_way = _seen_in_forward(clipper, losses_of, args, kwargs, batch)
        one = tree_map(lambda x: x[:1] if _batched(x, batch) else x, (args, kwargs))
        lost = [(a, b) for a, b in zip(dims, _seen_in_forward(clipper, losses_of, *one, 1)[0], strict=False) if b < a]
        if wrong_way:
            raise SelfCheckError(
                f"{wrong_way[0]} has batch_first=False and is given a tensor with the batch first, so it takes examples for positions, and mixes "
                "them: build it with batch_first=True."
            ) from error
        if lost:
            raise SelfCheckError(
                f"the model's output has {lost[0][0]} dimensions for {batch} examples and {lost[0][1]} for one: squeeze() takes the dimension of the "
                "batch too where it is 1. Name the dimension, as in squeeze(-1)."
            ) from error
        raise


def _seen_in_forward(
    clipper: PerExampleClipper, losses_of: LossFunction, args: tuple, kwargs: dict, batch: int
) -> tuple[list[int], list[str]]:
    """How many dimensions the model's outputs have, and the modules that expect the batch second and are given it first."""
    dims: list[int] = []
    wrong_way: list[str] = []

    def note_output(module: nn.Module, args: tuple, output: Any) -> None:
        dims.extend(x.dim() for x in _floating(output))

    def note_input(path: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        x = next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)), None)
        if x is not None and x.dim() == 3 and x.shape[0] == batch != x.shape[1]:
            wrong_way.append(f"'{path}' ({type(module).__name__})")

    with contextlib.ExitStack() as stack:
        for path, module in clipper.model.named_modules():
            if isinstance(module, (nn.MultiheadAttention, nn.RNNBase)) and not module.batch_first:
                stack.callback(module.register_forward_pre_hook(partial(note_input, path), with_kwargs=True).remove)
        stack.callback(clipper.model.register_forward_hook(note_output).remove)
        stack.enter_context(clipper._suspended())
        stack.enter_context(_kept_buffers(clipper.model))
        with contextlib.suppress(Exception):  # what the model does before it fails is enough
            losses_of(*args, **kwargs)
    return dims, wrong_way


def _check_locality_as_trained(clipper: PerExampleClipper, losses_of: LossFunction, args: tuple, kwargs: dict, batch: int) -> float:
    """Locality in the training mode the model is in, every pass with the same random numbers, and nothing frozen may change."""
    clipper.shards.reshard()
    watched = {name: t for name, t in clipper.model.named_parameters() if not t.requires_grad} | dict(clipper.model.named_buffers())
    before = {name: (id(t), t._version) for name, t in watched.items()}

    def replayed(*args: Any, **kwargs: Any) -> torch.Tensor:
        set_global_state(clipper.device, numbers)
        return losses_of(*args, **kwargs)

    with _forked_rng(clipper.device), _kept_buffers(clipper.model):
        torch.manual_seed(0)
        numbers = global_state(clipper.device)
        norms_b, _, low_precision = _clip(clipper, replayed, args, kwargs)
        error = _locality_error(clipper, replayed, args, kwargs, batch, norms_b)
        clipper.shards.reshard()
        watched = {name: t for name, t in clipper.model.named_parameters() if not t.requires_grad} | dict(clipper.model.named_buffers())
        changed = [name for name, t in watched.items() if before.get(name) != (id(t), t._version)]
    if changed:
        raise SelfCheckError(
            f"'{changed[0]}' changes in the forward pass although it is not trained: it would keep private data without noise. Switch that "
            "off (running statistics: track_running_stats=False; embeddings: no max_norm), or take the module out."
        )
    _require_locality(error, TOLERANCE[low_precision])
    return error


def _locality_error(
    clipper: PerExampleClipper, losses_of: LossFunction, args: tuple, kwargs: dict, batch: int, norms_b: torch.Tensor
) -> float:
    """How much (relative) the other examples' norms move when the last one is replaced, by either of two others."""
    worst = 0.0
    for source in range(min(2, batch - 1)):
        moved_args, moved_kwargs = _replace_example(args, kwargs, batch, batch - 1, source)
        moved_b = _clip(clipper, losses_of, moved_args, moved_kwargs)[0]
        same = (moved_b == norms_b) | (moved_b.isnan() & norms_b.isnan())
        change = torch.where(same, 0.0, (moved_b - norms_b).abs() / norms_b.clamp(min=1e-12))
        worst = max(worst, float(change[:-1].max()))
    return worst


def _require_locality(error: float, tolerance: float) -> None:
    if not error <= tolerance:
        raise SelfCheckError(
            f"an example's gradient moved by {error:.1e} (relative) when only another example of its batch changed: the model or its loss "
            "mixes examples (batch statistics, a loss averaged over the batch's tokens, a load-balancing loss, ...), or draws random numbers from a "
            "generator of its own: take torch's global one."
        )


def _require_equal_replicas(clipper: PerExampleClipper, total: list[torch.Tensor], tolerance: float) -> None:
    if differing := clipper.parallel.differing(clipper.parameters, total, tolerance):
        name = next(name for name, p in clipper.model.named_parameters() if p is clipper.parameters[differing[0]])
        raise SelfCheckError(
            f"every process of the tensor-parallel group holds parameter '{name}', but their gradients differ: each sees a part of what it is "
            "used on, and nobody adds them up. Give its module the plan's style 'replicated_with_grad_allreduce', or freeze it."
        )


@contextlib.contextmanager
def _perturbed(clipper: PerExampleClipper) -> Iterator[None]:
    """Inside, the trainable parameters are shifted a little."""
    values = [p.detach().clone() for p in clipper.parameters]
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for p in map(local, clipper.parameters):
                p.add_(torch.randn(p.shape, generator=generator).to(p), alpha=0.02)
        torch.clear_autocast_cache()  # it holds casts of the weights as they were
        yield
    finally:
        clipper.shards.reshard()
        with torch.no_grad():
            for p, value in zip(clipper.parameters, values, strict=True):
                p.copy_(value)
        torch.clear_autocast_cache()


def _settle_and_run(
    clipper: PerExampleClipper, losses_of: LossFunction, args: tuple, kwargs: dict, batch: int, others: Callable[[int], tuple[tuple, dict]]
) -> None:
    """Settle, and let the parents answer for modules that turn out not to be re-runnable."""
    while True:
        _settle(clipper, losses_of, args, kwargs, batch, others)
        try:
            _clip(clipper, losses_of, args, kwargs)
            break
        except UnsupportedModuleError as error:
            clipper.shards.recover()
            try:
                give_up(clipper.model, clipper.claims, error.module)
            except UnclaimedParameterError:
                raise error from None


def _settle(
    clipper: PerExampleClipper, losses_of: LossFunction, args: tuple, kwargs: dict, batch: int, others: Callable[[int], tuple[tuple, dict]]
) -> None:
    """Let claims settle on this input, so that every use of every parameter is seen by a module whose outputs have a batch."""
    taken = {n for x in tree_leaves((args, kwargs)) if _batched(x, batch) for n in x.shape[1:]}
    sizes = [n for n in range(3, 3 + 2 * len(taken) + 4, 2) if n not in taken][:2]
    inputs = {sizes[0]: others(sizes[0]), sizes[1]: _ragged(*others(sizes[1]), sizes[1])}

    def plain(size: int) -> torch.Tensor:
        with clipper._suspended():
            return losses_of(*inputs[size][0], **inputs[size][1])

    def tapped() -> None:
        clipper._hook()
        try:
            losses_of(*inputs[sizes[0]][0], **inputs[sizes[0]][1])
        except BaseException:
            clipper.shards.recover()
            raise

    try:
        # positions are not looked for where they come before the examples: flattened rows would not lie example by example
        positions = positions_of(args, kwargs, batch) if clipper.batch_first else set()
        settle(clipper.model, clipper.claims, clipper.parameters, plain, tapped, tuple(sizes), positions, clipper.shards)
    except UnclaimedParameterError as error:
        raise SelfCheckError(str(error)) from None
    finally:
        clipper._pass = None
        clipper._hook()


def _recycled(args: tuple, kwargs: dict, batch: int, size: int) -> tuple[tuple, dict]:
    """``size`` examples made of the given ones."""
    return tree_map(lambda x: x[torch.arange(size, device=x.device) % batch] if _batched(x, batch) else x, (args, kwargs))


def _ragged(args: tuple, kwargs: dict, batch: int) -> tuple[tuple, dict]:
    """The first example's masks end a position earlier, so that a model which drops padding before it computes is seen to do so."""

    def make(path: tuple, x: Any) -> Any:
        if not _batched(x, batch) or x.dim() < 2 or "mask" not in str(getattr(path[-1], "key", "")):
            return x
        x = x.clone()
        x[0, ..., -1] = 0
        return x

    return tree_map_with_path(make, (args, kwargs))


# ---- examples that influence each other ----


@dataclass(frozen=True)
class ExampleMixing:
    """Examples of a batch that influence each other's outputs.

    Attributes:
        pairs: (i, j): the output of example i depends on the input of example j.
        module: Path and class of the first module to finish whose output shows it; None where only gradients do.
    """

    pairs: list[tuple[int, int]]
    module: str | None

    def __str__(self) -> str:
        first, others = self.pairs[0], f" (and {len(self.pairs) - 1} other pairs)" if len(self.pairs) > 1 else ""
        where = f", first in {self.module}" if self.module else ""
        return f"the output of example {first[0]} depends on the input of example {first[1]}{others}{where}"


def find_example_mixing(model: nn.Module, batch: Any) -> ExampleMixing | None:
    """Find examples that influence each other in one forward pass of ``model``, in the training mode it is in.

    Seen are any gradient of output i with respect to input j (with respect to the embeddings' outputs for integers), and any change of
    output i, larger than rounding, when example j is replaced by its neighbour, which also shows what no gradient does: limited places,
    sorting, rounding. Costs one backward and one forward pass for each example. Parameters, their gradients, buffers and random state
    stay as they are.

    Args:
        model: Called with the batch; every floating-point tensor it returns has the examples in its first dimension, as have its inputs.
        batch: Public examples, at least two, all different: keyword arguments in a dict, positional ones in a tuple, or one tensor.
            A batch size that no other dimension has, or modules may be named that work on positions first.

    Returns:
        The pairs and the module; None if there is no such pair.

    Raises:
        ValueError: fewer than two examples, or outputs that are not finite or have another first dimension.
    """

    args, kwargs = _arguments(batch)
    size = batch_size_of(model, args, kwargs)
    if size < 2:
        raise ValueError("examples that influence each other cannot be seen in a batch of one: give at least two.")
    pairs = _pairs_by_gradient(model, args, kwargs, size)
    outputs = _projected_outputs(model, args, kwargs, size)
    modules: dict[int, str] = {}
    for j in range(size):
        moved = _projected_outputs(model, *_replace_example(args, kwargs, size, j, (j + 1) % size), size)
        for number, ((where, out_b), (_, moved_b)) in enumerate(zip(outputs, moved, strict=False)):
            differs_b = ~torch.isclose(out_b, moved_b, rtol=1e-4, atol=1e-5 * float(out_b.abs().max()))
            differs_b[j] = False
            if differs_b.any():
                modules[number] = where
                if number == len(outputs) - 1:  # the model itself
                    pairs |= {(i, j) for i in differs_b.nonzero().flatten().tolist()}
    return ExampleMixing(sorted(pairs), modules[min(modules)] if modules else None) if pairs else None


def _arguments(batch: Any) -> tuple[tuple, dict]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}


@contextlib.contextmanager
def _forward_on_trial(model: nn.Module) -> Iterator[None]:
    """Random numbers as in every such pass, and no trace of it afterwards."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    with _forked_rng(device), _kept_buffers(model):
        torch.manual_seed(0)
        yield


def _pairs_by_gradient(model: nn.Module, args: tuple, kwargs: dict, size: int) -> set[tuple[int, int]]:
    inputs: list[torch.Tensor] = []

    def watched(x: Any) -> Any:
        if _batched(x, size) and x.is_floating_point():
            inputs.append(x.detach().clone().requires_grad_())
            return inputs[-1] * 1  # a leaf must not be written to
        return x

    with contextlib.ExitStack() as stack, torch.enable_grad():
        stack.enter_context(_forward_on_trial(model))
        for module in model.modules():
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
                stack.callback(module.register_forward_hook(lambda module, args, output: watched(output)).remove)
        args, kwargs = tree_map(watched, (args, kwargs))
        outputs = _floating(model(*args, **kwargs))
        if not outputs or not all(_batched(x, size) and bool(torch.isfinite(x).all()) for x in outputs):
            raise ValueError(
                f"the model returns floating-point tensors of shapes {[tuple(x.shape) for x in outputs]} for {size} examples, and their rows must "
                "be the examples' own and finite. (A loss of the whole batch depends on all of them: leave the labels out.)"
            )
        out_b, pairs = _projected(outputs), set()
        for i in range(size if inputs and out_b.requires_grad else 0):
            found = torch.autograd.grad(out_b[i], inputs, retain_graph=True, allow_unused=True)
            for g in found:
                if g is not None:
                    pairs |= {(i, j) for j in g.flatten(1).ne(0).any(1).nonzero().flatten().tolist() if j != i}
    return pairs


def _projected_outputs(model: nn.Module, args: tuple, kwargs: dict, size: int) -> list[tuple[str, torch.Tensor]]:
    """Module and (B,) projection of its output, in the order in which the modules end; the model itself is the last."""
    found: list[tuple[str, torch.Tensor]] = []
    with contextlib.ExitStack() as stack, torch.no_grad():
        stack.enter_context(_forward_on_trial(model))
        for path, module in model.named_modules():

            def note(module: nn.Module, args: tuple, output: Any, path: str = path) -> None:
                tensors = [x for x in _floating(output) if _batched(x, size)]
                if tensors:
                    found.append((f"'{path}' ({type(module).__name__})" if path else type(module).__name__, _projected(tensors)))

            stack.callback(module.register_forward_hook(note).remove)
        model(*args, **kwargs)
    return found


# ---- the passes that are compared ----


def _clip(clipper: PerExampleClipper, losses_of: LossFunction, args: tuple, kwargs: dict):
    for p in clipper.parameters:
        p.grad = None
    losses = losses_of(*args, **kwargs)
    seen = (losses.dtype, clipper.low_precision, clipper._pass.low_precision if clipper._pass else torch.float32)
    low_precision = max(seen, key=TOLERANCE.__getitem__)
    norms_b = clipper.backward(losses)
    return norms_b, [torch.zeros_like(p, dtype=sum_dtype(p)) if p.grad is None else p.grad for p in clipper.parameters], low_precision


def _one_at_a_time(clipper: PerExampleClipper, losses_of: LossFunction, args: tuple, kwargs: dict, batch: int, samples: list):
    """(B,) norms, the clipped sum, and the worst relative error of ``samples``, gradients with a batch (or None) for each parameter."""
    norms, total, worst, shards = [], [torch.zeros_like(p, dtype=sum_dtype(p)) for p in clipper.parameters], 0.0, clipper.shards
    wholes = [shards.wholes(p) for p in clipper.parameters]
    with clipper._suspended():
        for i in range(batch):
            one_args, one_kwargs = tree_map(lambda x, i=i: x[i : i + 1] if _batched(x, batch) else x, (args, kwargs))
            loss = losses_of(*one_args, **one_kwargs).sum()
            found = iter(torch.autograd.grad(loss, [whole for its in wholes for whole in its], allow_unused=True))
            grads = [_sum([next(found) for _ in its]) for its in wholes]
            grads = [None if g is None else clipper.parallel.native_gradient(p, g) for p, g in zip(clipper.parameters, grads, strict=True)]
            norm = _length([g for g in grads if g is not None])
            coefficient = float((clipper.max_grad_norm / norm).clamp(max=1.0))
            for p, running, g in zip(clipper.parameters, total, grads, strict=True):
                if g is not None:
                    g = local(g).to(sum_dtype(p)) * coefficient
                    running.add_(shards.summed(p, g) if shards else like(g, p))
            norms.append(norm)
            given = [(s[i], torch.zeros_like(s[i]) if g is None else g) for s, g in zip(samples, grads, strict=True) if s is not None]
            if given:
                worst = max(worst, float(_distance(*map(list, zip(*given, strict=True))) / norm.clamp(min=1e-12)))
    return torch.stack(norms), total, worst


def _sum(grads: list[torch.Tensor | None]) -> torch.Tensor | None:
    given = [g for g in grads if g is not None]
    return sum(given[1:], given[0]) if given else None


def _length(tensors: list[torch.Tensor]) -> torch.Tensor:
    norms = everywhere(torch.linalg.vector_norm(t.double()) for t in tensors)
    return torch.stack([norm.cpu() for norm in norms]).norm().float().to(tensors[0].device)


def _distance(a: list[torch.Tensor], b: list[torch.Tensor]) -> torch.Tensor:
    return _length([x - y for x, y in zip(a, b, strict=True)])


def _second_dimension_first(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    return tree_map(lambda x: x.transpose(0, 1) if isinstance(x, torch.Tensor) and x.dim() > 1 else x, (args, kwargs))


def _batch_second(losses_of: LossFunction) -> LossFunction:
    """``losses_of`` for inputs whose batch comes first, given one for those where it comes second."""

    def swapped(*args: Any, **kwargs: Any) -> torch.Tensor:
        args, kwargs = _second_dimension_first(args, kwargs)
        return losses_of(*args, **kwargs)

    return swapped


def _random_output_loss(model: nn.Module, *, batch_first: bool = True) -> LossFunction:
    """A loss for models whose own is not known: a fixed random weight for every number an example puts out."""

    def losses_of(*args: Any, **kwargs: Any) -> torch.Tensor:
        return _projected(_outputs_by_example(model, args, kwargs, batch_first=batch_first))

    return losses_of


def _outputs_by_example(model: nn.Module, args: tuple, kwargs: dict, *, batch_first: bool) -> list[torch.Tensor]:
    """Every tensor of numbers that the model returns for this input, examples first."""
    batch = batch_size_of(model, args, kwargs, batch_first)

    def has_batch_second(x: torch.Tensor) -> bool:
        """As the states of a recurrent layer have, whatever comes first in its outputs."""
        return x.dim() > 1 and x.shape[1] == batch and (len(x) != batch or (not batch_first and x.dim() > 2))

    output = model(*args, **kwargs)
    tensors = [x for x in _floating(output) if x.dim()]
    if not tensors:
        raise SelfCheckError(
            f"{type(model).__name__} returns {type(output).__name__}, in which there is no tensor of floating-point numbers with a dimension for the "
            "examples, so nothing can be checked: return one, in a tuple, dict or dataclass if need be, or hand over a loss_function."
        )
    return [x.transpose(0, 1) if has_batch_second(x) else x for x in tensors]


def _floating(structure: Any) -> list[torch.Tensor]:
    """The tensors of numbers in it, also in mappings and dataclasses that torch does not know."""
    found: list[torch.Tensor] = []
    for x in tree_leaves(structure):
        if isinstance(x, torch.Tensor):
            found += [x] if x.is_floating_point() else []
        elif isinstance(x, Mapping):
            found += _floating(list(x.values()))
        elif is_dataclass(x) and not isinstance(x, type):
            found += _floating([getattr(x, field.name, None) for field in fields(x)])
    return found


def _projected(tensors: list[torch.Tensor]) -> torch.Tensor:
    """(B,), a fixed random linear function of each row of the tensors."""
    losses = []
    for x in tensors:
        generator = torch.Generator().manual_seed(x[0].numel())
        weight = torch.randn(x[0].numel(), generator=generator).to(x.device) / max(1, x[0].numel()) ** 0.5
        losses.append(x.flatten(1).float() @ weight if x.dim() > 1 else x.float() * weight)
    return torch.stack(losses).sum(0)


# ---- synthetic input ----


def synthetic_inputs(model: nn.Module, args: tuple, kwargs: dict, rows: int | None = None) -> tuple[tuple, dict]:
    """Random input with the shapes, dtypes and masks of the given one, ``rows`` examples (default: three, five or seven)."""
    batch = batch_size_of(model, args, kwargs)
    sizes = {n for x in tree_flatten((args, kwargs))[0] if _batched(x, batch) for n in x.shape[1:]}
    sizes |= {m.num_layers * (2 if m.bidirectional else 1) for m in model.modules() if isinstance(m, nn.RNNBase)}
    rows = rows or next(n for n in (3, 5, 7, 9, 11) if n not in sizes)
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    config = getattr(model, "config", None)
    vocabulary = getattr(config, "vocab_size", None) or min(tables, default=2)
    num_labels = max(2, getattr(config, "num_labels", None) or 2)
    reads_out = getattr(model, "get_output_embeddings", None)
    token_labels = vocabulary if reads_out is None or reads_out() is not None else num_labels
    name_of = _names_of(model)

    longest = max((n for n in sizes if n < 2**20), default=0)

    def make(path: tuple, x: Any) -> Any:
        if not _batched(x, batch):
            return x
        name = name_of(path)
        recycled = x[torch.arange(rows, device=x.device) % batch]
        if x.is_floating_point():
            return recycled if "mask" in name else torch.randn(recycled.shape, device=x.device).to(x.dtype)
        if x.dtype == torch.bool or any(word in name for word in ("mask", "position", "token_type", "length")):
            return recycled
        if x.dim() == 1 and "label" not in name and all(0 < n <= longest for n in x.tolist()):
            return recycled  # lengths of rows, whatever they are called
        if "label" in name:
            classes = num_labels if x.dim() == 1 else token_labels
            drawn = torch.randint(0, classes, recycled.shape, device=x.device, dtype=x.dtype)
            return drawn.masked_fill(recycled < 0, -100)
        high = vocabulary if name.endswith("input_ids") else min(tables, default=2)
        return torch.randint(0, high, recycled.shape, device=x.device, dtype=x.dtype)

    return tree_map_with_path(make, (args, kwargs))


def _names_of(model: nn.Module) -> Callable[[tuple], str]:
    """From a path into (args, kwargs) to the name of that argument of the model."""
    positional = dict(enumerate(inspect.signature(model.forward).parameters))

    def name_of(path: tuple) -> str:
        return positional.get(path[1].idx, "") if len(path) == 2 and path[0].idx == 0 else str(getattr(path[-1], "key", ""))

    return name_of


def _replace_example(args: tuple, kwargs: dict, batch: int, row: int, source: int) -> tuple[tuple, dict]:
    """Example ``row`` becomes a copy of another, so that its content is valid whatever it is."""

    def change(x: Any) -> Any:
        return torch.cat([x[:row], x[source : source + 1], x[row + 1 :]]) if _batched(x, batch) else x

    return tree_map(change, (args, kwargs))


def _batched(x: Any, batch: int) -> bool:
    return isinstance(x, torch.Tensor) and x.dim() > 0 and len(x) == batch


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = {m: m.training for m in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for m, training in modes.items():
            m.training = training


@contextlib.contextmanager
def _undisturbed(clipper: PerExampleClipper) -> Iterator[None]:
    clipper.shards.reshard()
    grads = [(p.grad, p.grad_dtype) for p in clipper.parameters]
    bound, modes = clipper.max_grad_norm, {m: m.training for m in clipper.model.modules()}
    follower, clipper._follower = clipper._follower, None
    try:
        with torch.enable_grad(), clipper._state.during_check():
            yield
    finally:
        clipper._max_grad_norm, clipper._pass, clipper._follower = bound, None, follower
        clipper.shards.reshard()
        for m, training in modes.items():
            m.training = training
        for p, (grad, dtype) in zip(clipper.parameters, grads, strict=True):
            p.grad = None
            if p.grad_dtype != dtype:
                p.grad_dtype = dtype
            p.grad = grad
            if hasattr(p, "grad_sample"):
                del p.grad_sample


# ---- float32, whatever precision trains ----


@contextlib.contextmanager
def _in_float32(clipper: PerExampleClipper) -> Iterator[list[str]]:
    """Inside, what trains in less computes in float32: bf16's rounding would hide a tenth of a batch's influence on an example.

    Autocast is off, also where the model enters it, products are full float32, and parameters and buffers in bf16 or fp16 have float32
    values, for which memory must hold both for a moment. Afterwards each is the tensor it was. Left alone are quantised weights, tensors
    of other classes, and the weights of a model that is split over processes. Call it with the gradients put aside (:func:`_undisturbed`).

    The list that is given names what was replaced, as far as the model has run.
    """
    tensors = [*clipper.model.parameters(), *clipper.model.buffers()]
    half = [t for t in tensors if t.dtype in HALF and type(t.data) is torch.Tensor]
    kept = [] if clipper.shards or clipper.parallel else [(t, t.data) for t in half]
    low_precision, settings = clipper.low_precision, product_settings(clipper.device)
    replaced, enter = ["weights"] if kept else [], torch.autocast.__enter__

    def enter_disabled(region: torch.autocast) -> torch.autocast:
        enabled, region._enabled = region._enabled, False
        replaced.extend(["autocast"] if enabled else [])
        try:
            return enter(region)
        finally:
            region._enabled = enabled

    if torch.is_autocast_enabled(clipper.device.type):
        replaced.append("autocast")
    with without_autocast(clipper.device), full_products(settings if clipper.convolves else settings[:1]) as were_reduced:
        if were_reduced:
            replaced.append("products")
        torch.autocast.__enter__ = enter_disabled
        try:
            for p in clipper.parameters:
                p.grad = None
            for t, data in kept:
                t.data = data.float()
            clipper.low_precision = next((p.dtype for p in clipper.model.parameters() if p.dtype in HALF), torch.float32)
            yield replaced
        finally:
            torch.autocast.__enter__ = enter
            clipper.low_precision = low_precision
            for p in clipper.parameters:
                p.grad = None
            for t, data in kept:
                t.data = data


def _in_float32_if_possible(
    clipper: PerExampleClipper, losses_of: LossFunction, inputs: tuple[tuple, dict], compare: Callable[[], Any]
) -> tuple[Any, list[str]]:
    """What ``compare`` returns in float32, None where the model does not run in it, and what was replaced to make it run."""
    replaced = ["weights"]
    try:
        with _in_float32(clipper) as replaced:
            if _stays_in_float32(clipper, losses_of, *_with_float32(inputs)):
                return compare(), replaced
    except torch.OutOfMemoryError:  # a large model in bf16 may fit once, and not in float32 as well
        pass
    logger.warning(
        "%s could not be checked in float32 (it casts by itself, holds weights that stay as they are, is split over processes in less precision, "
        "or does not fit), so small influences of one example on another may hide in its rounding.",
        type(clipper.model).__name__,
    )
    return None, replaced


def _with_float32(structure: Any) -> Any:
    return tree_map(lambda x: x.float() if isinstance(x, torch.Tensor) and x.dtype in HALF else x, structure)


def _stays_in_float32(clipper: PerExampleClipper, losses_of: LossFunction, args: tuple, kwargs: dict) -> bool:
    """Whether the model runs in float32 now, without casting to less by itself: read off the graph that one pass leaves."""
    if clipper.low_precision in HALF:
        return False
    frozen = [
        p for p in clipper.model.parameters() if p.is_floating_point() and not (p.requires_grad or clipper.shards or clipper.parallel)
    ]
    wholes = [whole for p in clipper.parameters for whole in clipper.shards.wholes(p)]
    try:
        with clipper._suspended(), _evaluating(clipper.model), _kept_buffers(clipper.model):
            for p in frozen:
                p.requires_grad_()  # so that the graph shows what they compute in
            losses = losses_of(*args, **kwargs)
            low = dtypes_in_graph(losses) & {*HALF}
            if losses.requires_grad:
                torch.autograd.grad(losses.sum(), wholes, allow_unused=True)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # anything else is what the comparison will stumble over too, and say
        clipper.shards.recover()
        return not re.search("d(ata )?type|BFloat16|Half|bf16|fp16", str(error))
    finally:
        for p in frozen:
            p.requires_grad_(False)
    return not low


@contextlib.contextmanager
def _kept_buffers(model: nn.Module) -> Iterator[None]:
    """Afterwards every buffer has the content it had. (Batch normalisation writes to its own without telling autograd.)"""
    kept = {name: t.clone() for name, t in model.named_buffers()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, t in model.named_buffers():
                if name in kept and kept[name].shape == t.shape:
                    t.copy_(kept[name])
