"""The check that padding leaves gradients alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, cast

import torch
from torch.utils._pytree import keystr, tree_map_with_path

from ...runtime.randomness import forked_generators
from ..engine import ClippingEngine
from ..errors import SelfCheckError
from ..recorded_call import ForwardPass
from .float32 import in_float32_if_possible, with_float32
from .lookups import tables_of_ids
from .reference import TOLERANCE, clip, distance, length_of, perturbed
from .spread_numbers import spread_numbers
from .synthetic import (
    LossFunction,
    argument_names,
    batch_second,
    evaluating,
    floating_tensors,
    only_rows,
    outputs_by_example,
    predicts_words,
    projected,
    random_output_loss,
    second_dimension_first,
    synthetic_inputs,
    with_rows,
)

PADDING_TOLERANCE = 1e-4  # in full fp32, where padding changes a gradient by 1e-7 if it leaves it alone


def check_padding(
    engine: ClippingEngine,
    args: tuple,
    kwargs: dict,
    own_bt: torch.Tensor,
    loss_function: LossFunction | None = None,
    row: int | None = None,
    padded_dims: Mapping[str, Sequence[int]] | None = None,
) -> float:
    """Check that an example's gradient is the same with and without its padding, on synthetic input shaped and padded
    like the given one.

    Where examples are padded to the length of others, one that is not lets those decide its gradient. Looked at in
    float32, and in the mode that the model is in, with random numbers that do not depend on lengths; where it draws
    some of which that is not known, in evaluation.

    Args:
        engine: Attached to the model as it trains; the model was checked.
        args: Positional arguments of the model, tensors with the batch first. Those that have T in a later dimension
            are cut to the example's own positions; where they are padding, they keep the numbers they have.
        kwargs: Keyword arguments likewise. Lengths, integers of shape (B,), stay true, and so does T where it is given
            as one number for all rows.
        own_bt: (B, T), or (B, ..., T), of which one is enough: which positions are each example's own, as a mask says
            or lengths do.
        loss_function: As of :func:`check_model`; default: a random linear function of every output at the example's
            own positions.
        row: Of which example; default: the longest that has padding.
        padded_dims: By path (``torch.utils._pytree.keystr``) in ``(args, kwargs)``, in which dimensions a tensor is
            padded so; those that it does not name are, where they have T in a later dimension.

    Returns:
        The relative change of its gradient; 0 where nothing is padded.

    Raises:
        SelfCheckError: padding changes it, or the model cannot compute the example without.
    """
    engine.position_dims = []
    losses_of = loss_function or random_output_loss(engine.model, batch_first=engine.batch_first)
    if not engine.batch_first:
        (args, kwargs), losses_of = second_dimension_first(args, kwargs), batch_second(losses_of)
    shape, own_bt = own_bt.shape, own_bt.bool().flatten(1, -2).any(1) if own_bt.dim() > 2 else own_bt.bool()
    if row is None:
        count_b = own_bt.sum(1)
        row = int(count_b.masked_fill(count_b == own_bt.shape[1], 0).argmax())
    own_t = own_bt[row]
    if own_t.all() or not own_t.any():
        return 0.0
    with forked_generators(engine.trainable.device), engine.trial():
        if engine.trainable.shards or engine.trainable.parallel:
            torch.manual_seed(0)
        padded, alone = _with_and_without_padding(
            engine, losses_of, args, kwargs, own_bt, row, shape, padded_dims or {}
        )
        given = None if loss_function is None else losses_of
        with _comparable(engine, losses_of, padded, {len(own_t), int(own_t.sum())}):
            args, kwargs = with_float32(padded)
            found, _ = in_float32_if_possible(
                engine,
                partial(losses_of, *args, **kwargs),
                lambda: _change_by_padding(engine, given, (args, kwargs), with_float32(alone), own_t),
            )
            change, low_precision = found or _change_by_padding(engine, given, padded, alone, own_t)
    tolerance = PADDING_TOLERANCE if found else TOLERANCE[low_precision]
    if not change <= tolerance:
        first, last = bool(own_t[0]), bool(own_t[-1])
        side = {
            (True, False): "on the right",
            (False, True): "on the left",
            (True, True): "inside",
            (False, False): "on both sides",
        }
        raise SelfCheckError(
            f"an example's gradient changes by {change:.1e} (relative) when it is padded {side[first, last]} to the "
            "length of a longer one of its batch, so every example has a say in the gradients of others, beyond the "
            "clipping bound. Pad on the other side (padding_side of the tokenizer), or pad all examples to one length "
            "(padding='max_length'), pad targets with what the loss ignores (-100, the label_pad_token_id of "
            "collators), or leave padding out in a per-example loss of your own (on the left the last padding "
            "predicts an example's first token, too); give a model with learned positions position_ids that are "
            "counted from the mask; a recurrent model: pack its input (pack_padded_sequence), or read its states at "
            "each example's last own position."
        )
    return change


def expect_no_gradient_at_padding(
    engine: ClippingEngine, output: Any, row: int, own_t: torch.Tensor, dims: Sequence[int | None]
) -> None:
    """Expect that a loss of what the model returned has no gradient at the positions of a row that are padding.

    Args:
        output: What the model returned for a batch.
        row: A row of the batch, which is padded to the length of others.
        own_t: (T,), which positions are its own.
        dims: Which dimension of each output is that of these positions, as :func:`check_padding` has found.
    """

    def expect(gradient: torch.Tensor | None, dim: int) -> None:
        if gradient is None:  # the loss does not read this output
            return
        of_padding = gradient[row].index_select(dim - 1, (~own_t).nonzero().flatten().to(gradient.device))
        engine.conditions.expect(~(of_padding.abs().max() > 0), _refuse_gradient)

    size = cast(ForwardPass, engine.forward).batch_size
    outputs = [x for x in floating_tensors(with_rows(output)) if x.dim()]
    for x, dim in zip(outputs, dims, strict=False):
        has_positions = dim is not None and x.dim() > dim and (len(x), x.shape[dim]) == (size, len(own_t))
        if has_positions and engine.batch_first and x.requires_grad:
            x.register_hook(partial(expect, dim=dim))


def _refuse_gradient() -> NoReturn:
    raise SelfCheckError(
        "the loss has a gradient at outputs for positions that are padding: examples are padded to the length of "
        "others, so every example has a say in the gradients of others, beyond the clipping bound. Leave these "
        "positions out of the loss (ignore_index, or a mask, in the mean too), or pad all examples to one length "
        "(padding='max_length')."
    )


@contextlib.contextmanager
def _comparable(
    engine: ClippingEngine, losses_of: LossFunction, given: tuple[tuple, dict], lengths: Collection[int]
) -> Iterator[None]:
    """Inside, random numbers do not depend on which of these ``lengths`` an input has. The model evaluates where the
    losses of what is ``given`` draw numbers that could.

    What raises here has nothing to do with padding.
    """

    def are_known() -> bool:
        try:
            with engine.suspended(), spread_numbers(lengths) as draws_no_others:
                engine.state.restore()
                losses_of(*given[0], **given[1])
                return draws_no_others()
        except Exception:
            engine.trainable.shards.recover()
            return False

    if not engine.trainable.shards.any_rank(not are_known(), engine.trainable.device):
        with spread_numbers(lengths):
            yield
    else:
        with evaluating(engine.model):
            with engine.suspended():
                engine.state.restore()
                losses_of(*given[0], **given[1])
            yield


def _change_by_padding(
    engine: ClippingEngine, loss_function: LossFunction | None, padded: tuple, alone: tuple, own_t: torch.Tensor
) -> tuple[float, torch.dtype]:
    """Returns how much (relative) one example's gradient differs between these inputs, and the lowest precision
    seen."""
    with perturbed(engine):
        try:
            losses_of = loss_function or _own_output_loss(engine, padded, alone, own_t)
            without = clip(engine, partial(losses_of, *alone[0], **alone[1])).total
        except (RuntimeError, ValueError, IndexError) as error:
            raise SelfCheckError(
                f"an example with {int(own_t.sum())} positions of its own, padded to {len(own_t)}, cannot be computed "
                f"without the padding ({str(error).splitlines()[0]}), so nobody knows what the padding does to its "
                "gradient. Leave out examples that are so short, or pad all to one length (padding='max_length')."
            ) from error
        with_padding = clip(engine, partial(losses_of, *padded[0], **padded[1]))
        change = distance(with_padding.total, without) / length_of(without).clamp(min=1e-12)
        return float(change), with_padding.low_precision


def _with_and_without_padding(
    engine: ClippingEngine,
    losses_of: LossFunction,
    args: tuple,
    kwargs: dict,
    own_bt: torch.Tensor,
    row: int,
    shape: torch.Size,
    padded_dims: Mapping[str, Sequence[int]],
) -> tuple[tuple, tuple]:
    """Synthetic arguments for this row, with the padding it has, and without; a label wherever there may be one."""
    model = engine.model
    (size, length), own_t, count_b = own_bt.shape, own_bt[row], own_bt.sum(1)
    # with a length of their own
    own_targets = getattr(getattr(model, "config", None), "is_encoder_decoder", False) and predicts_words(model)
    name_of = argument_names(model)

    def position_dims(path: tuple, x: torch.Tensor) -> list[int]:
        name, dims = name_of(path), [d for d in range(1, x.dim()) if x.shape[d] == length]
        if (known := padded_dims.get(keystr(path))) is not None:
            return [d for d in known if d in dims]
        # several classes may happen to be as many as positions
        if is_of_targets(name) and (own_targets or x.is_floating_point()):
            return []
        if any(padded_dims.values()) and _goes_on(x, row, own_t, dims):
            return []
        if x.shape == shape:
            return dims[-1:]
        return dims if "mask" in name or x.dtype == torch.bool else dims[:1]

    def is_of_lengths(path: tuple, x: torch.Tensor) -> bool:
        if (
            x.dim() != 1
            or len(x) != size
            or x.is_floating_point()
            or x.dtype == torch.bool
            or is_of_targets(name_of(path))
        ):
            return False
        return "length" in name_of(path) or bool((x == count_b.to(x.device)).all()) or bool((x == length).all())

    def in_place(path: tuple, given: Any, drawn: Any) -> Any:
        if not isinstance(given, torch.Tensor) or not given.dim():
            return drawn
        given_row = given[row : row + 1] if len(given) == size else given
        if is_of_lengths(path, given):
            return given_row
        if is_of_targets(name_of(path)) and position_dims(path, given):
            drawn = drawn.masked_fill(drawn == -100, 1)
        for dim in position_dims(path, given):
            drawn = drawn.where(
                own_t.to(drawn.device).view([-1 if d == dim else 1 for d in range(drawn.dim())]), given_row
            )
        return drawn

    def own_positions(path: tuple, given: Any, x: Any) -> Any:
        if _is_number(given, length):  # the longest row decides it, as it does the padding
            return own_t.sum().to(x) if isinstance(x, torch.Tensor) else int(own_t.sum())
        if not isinstance(given, torch.Tensor) or not given.dim():
            return x
        if is_of_lengths(path, given):
            return x.where(x != length, own_t.sum().to(x))
        of_all = [0] if given.dim() == 1 and len(given) == length != size else []  # one row for all of them
        for dim in [*of_all, *position_dims(path, given)]:
            x = x.index_select(dim, own_t.nonzero().flatten().to(x.device))
        return x

    given = args, kwargs
    args, kwargs = only_rows([row], args, kwargs, size)
    drawn = synthetic_inputs(model, args, kwargs, 1, table_of=tables_of_ids(engine, losses_of, args, kwargs))
    padded = tree_map_with_path(in_place, given, drawn)
    return padded, tree_map_with_path(own_positions, given, padded)


def _is_number(x: Any, length: int) -> bool:
    """Whether it is a whole number for all rows together, and this one."""
    if isinstance(x, torch.Tensor):
        return not x.dim() and not x.is_floating_point() and x.dtype != torch.bool and int(x) == length
    return isinstance(x, int) and not isinstance(x, bool) and x == length


def _own_output_loss(engine: ClippingEngine, padded: tuple, alone: tuple, own_t: torch.Tensor) -> LossFunction:
    """A loss for models whose own is not known, of what they put out for ``alone``, and of as much of it where there
    is padding too."""

    def outputs(args: tuple, kwargs: dict) -> list[torch.Tensor]:
        args, kwargs = (args, kwargs) if engine.batch_first else second_dimension_first(args, kwargs)
        return outputs_by_example(engine.model, args, kwargs, batch_first=engine.batch_first)

    with engine.suspended():
        shapes = [x.shape for x in outputs(*alone)]
        given = [x.shape for x in outputs(*padded)]
    engine.position_dims = [
        next((d for d in range(1, len(a)) if (a[d], b[d]) == (len(own_t), int(own_t.sum()))), None)
        for a, b in zip(given, shapes, strict=True)
    ]
    _leave_constants_out(engine, partial(outputs, *padded), ~own_t)

    def own(x: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        for dim, (size, wanted) in enumerate(zip(x.shape, shape, strict=True)):
            if size == len(own_t) != wanted:
                x = x.index_select(dim, own_t.nonzero().flatten().to(x.device))
            elif size != wanted:  # of fewer positions than the input has, as convolutions make
                x = x.narrow(dim, 0 if own_t[0] else size - wanted, wanted)
        return x

    def losses_of(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensors = outputs(args, kwargs)
        return projected([own(x, shape) for x, shape in zip(tensors, shapes, strict=True)])

    return losses_of


def _leave_constants_out(
    engine: ClippingEngine, outputs: Callable[[], list[torch.Tensor]], padding_t: torch.Tensor
) -> None:
    """Take those outputs for ones without positions that are constants where the input is padding (zeros behind packed
    rows, what a mask has multiplied): no gradient of a loss leads from there to a parameter."""
    trainable = engine.trainable
    if trainable.shards or trainable.parallel:
        return
    with engine.suspended(), torch.enable_grad():
        for i, (x, dim) in enumerate(zip(outputs(), engine.position_dims, strict=True)):
            if dim is None or not x.requires_grad:
                continue
            beside = x.index_select(dim, padding_t.nonzero().flatten().to(x.device))
            loss = (beside * torch.rand_like(beside)).sum()
            found = torch.autograd.grad(loss, trainable.parameters, allow_unused=True, retain_graph=True)
            if not any(g is not None and bool(g.any()) for g in found):
                engine.position_dims[i] = None


def _goes_on(x: torch.Tensor, row: int, own_t: torch.Tensor, dims: Sequence[int]) -> bool:
    """Whether ids of shape (B, T), of which nothing is known but their length, go on where the row is padding, so that
    they happen to be as long: they are neither one number there nor counted on, as positions are."""
    if x.dim() != 2 or not dims or x.is_floating_point() or x.dtype == torch.bool or len(x) <= row:
        return False
    steps = x[row][(~own_t).to(x.device)].diff()
    return bool(len(steps)) and not bool((steps == steps[0]).all())


def is_of_targets(name: str) -> bool:
    """Whether an argument or a column is named like targets, or like what a decoder is given of them."""
    return "label" in name or name.startswith("decoder")
