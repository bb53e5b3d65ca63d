"""Checks of the batches that a training meets: clipping is exact for them, their padding changes no gradient, and
their losses do not compare examples."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils._pytree import keystr, tree_leaves, tree_leaves_with_path, tree_map, tree_map_with_path

from . import distributed
from .clipping import PerExampleClipper
from .clipping.batch_dims import batch_size_of
from .clipping.checks.padding import is_of_targets
from .clipping.checks.synthetic import LossFunction
from .clipping.errors import SelfCheckError
from .data import LogicalBatches, PhysicalBatch
from .losses import refuse_targets_padded_on_the_left
from .ragged import tensors_with_rows
from .randomness import seeded_global_generators
from .rows import Padding, leaves, same_numbers

logger = logging.getLogger(__name__)


class BatchChecks:
    """Runs the self-check again for masks and counts of another kind, and the check of padding once for every kind.

    Args:
        clipper: It runs the checks on its model.
        data: The source of the batches.
        announce: It is called with a sentence when the self-check has passed.
        label_names: The names of the model's labels.
    """

    def __init__(
        self,
        clipper: PerExampleClipper,
        data: LogicalBatches,
        announce: Callable[[str], None],
        label_names: Sequence[str],
    ):
        self._clipper, self._data, self._announce, self._label_names = clipper, data, announce, list(label_names)
        self._traits: frozenset | None = None  # the kinds of masks and counts that were checked; None before the first
        self._paddings: set[tuple] = set()  # the kinds of padding that were checked
        self._position_dims: dict[frozenset[str] | None, list[int | None]] = {}  # of outputs, by what is padded
        self._lengths: set[int] = set()  # the lengths of rows that came padded
        self._begun = clipper.checks_begun  # what was checked belongs to the model as it was then

    def check(
        self, batch: PhysicalBatch, args: tuple, kwargs: dict, loss_function: LossFunction | None = None
    ) -> None:
        """Check what is new about ``batch``, with which the model is called as ``model(*args, **kwargs)``.

        Raises:
            SelfCheckError: clipping is not exact for such a batch, or its padding changes gradients.
        """
        clipper = self._clipper
        clipper.require_same_parameters()  # before a check meets what was changed
        if not clipper.self_check:
            return
        clipper.recheck_if_changed()
        if self._begun != clipper.checks_begun:
            self._begun, self._traits, self._paddings = clipper.checks_begun, None, set()
        refuse_targets_padded_on_the_left(clipper.model, kwargs, self._label_names)
        is_new = self._traits is not None and not batch.traits <= self._traits
        alone = not (clipper.shards or clipper.parallel)  # ranks meet different kinds, and must check the same input
        if not clipper.checked or (is_new and alone):
            report = clipper.check(args, kwargs, loss_function)
            self._announce(
                f"self-check passed in {report.seconds:.1f} s: per-example norms are exact to "
                f"{report.norm_error:.0e}, clipped sums to {report.sum_error:.0e}, and no example moves another's "
                f"gradient by more than {report.locality_error:.0e}"
            )
        self._traits = batch.traits | (self._traits or frozenset())
        self._check_paddings(batch, args, kwargs, loss_function)

    def _check_paddings(
        self, batch: PhysicalBatch, args: tuple, kwargs: dict, loss_function: LossFunction | None
    ) -> None:
        clipper = self._clipper
        given = [
            (args, kwargs, padding, _are_padded(padding, batch, args, kwargs))
            for padding in batch.paddings
            if self._is_to_be_checked(padding)
        ]
        if not clipper.shards:
            for each in given:
                self._check_padding(*each, loss_function)
            return
        for _ in range(distributed.max_over_ranks(len(given), clipper.device)):
            args, kwargs, padding, are_padded = distributed.broadcast_first(given.pop() if given else None)
            self._check_padding(args, kwargs, padding, are_padded, loss_function)

    def _check_padding(
        self,
        args: tuple,
        kwargs: dict,
        padding: Padding,
        are_padded: dict[str, bool] | None,
        loss_function: LossFunction | None,
    ) -> None:
        if are_padded is None:
            return
        clipper = self._clipper
        rows = batch_size_of(clipper.model, args, kwargs, clipper.batch_first)
        # rows that were packed since they were collated have no dimension of the padded length
        if any(padding.length in x.shape for x in tensors_with_rows((args, kwargs))):
            own_bt = torch.ones(rows, padding.length, dtype=torch.bool)
            own_bt[padding.row] = padding.own_t
            try:
                clipper.check_padding(args, kwargs, own_bt, loss_function, padding.row, are_padded)
            except SelfCheckError as error:
                if padding.by_others or len(self._lengths) > 1:
                    raise
                if self._data.has_one_longest():
                    raise SelfCheckError(
                        f"{error} One row alone fills the {padding.length} positions that rows came padded to, so it "
                        "seems to have decided how many those are. If you chose them, choose more, so that no row "
                        f"fills them (max_length={padding.length + 8} for example)."
                    ) from error
                logger.warning(
                    "rows came padded to one length, %d, which several rows fill. If it is the length of the longest "
                    "example, and not one that was chosen without looking at the data, this is not private: %s",
                    padding.length, error,
                )  # fmt: skip
            self._position_dims[padding.columns] = clipper.position_dims
        self._paddings.add(padding.kind)

    def expect_no_gradient_at_padding(self, batch: PhysicalBatch, output: Any) -> None:
        """Expect that the loss has no gradient at positions of the model's output that are a row's padding."""
        for padding in batch.paddings:
            dims = self._position_dims.get(padding.columns)
            if padding.by_others and dims:
                self._clipper.expect_no_gradient_at_padding(output, padding.row, padding.own_t, dims)

    def _is_to_be_checked(self, padding: Padding) -> bool:
        return padding.kind not in self._paddings and (self._depends_on_others(padding) or padding.fills)

    def _depends_on_others(self, padding: Padding) -> bool:
        """Return whether other rows decide how much padding a row gets. Rows that came padded may all have one length
        that is no row's; if lengths differ, longer rows decided."""
        if not padding.by_others:
            self._lengths.add(padding.length)
        return padding.by_others or len(self._lengths) > 1


def _are_padded(padding: Padding, batch: PhysicalBatch, args: tuple, kwargs: dict) -> dict[str, bool] | None:
    """By path, whether an argument of the model is a column that is padded so. Arguments that are no columns are left
    out. None where one of those might be, and might be one that is padded otherwise to the same length."""
    if padding.columns is None:
        return {}
    columns = [(name, x) for name, x in leaves(batch.rows) if isinstance(x, torch.Tensor)]
    found, others = {}, False
    for path, x in tree_leaves_with_path((args, kwargs)):
        if not isinstance(x, torch.Tensor):
            continue
        own_name = str(getattr(path[-1], "key", ""))
        same = [(name, y) for name, y in columns if y.shape == x.shape]
        name = next((name for name, _ in same if name == own_name), None) or next(
            (name for name, y in same if y.dtype == x.dtype and same_numbers(x, y.to(x.device))), None
        )
        if name is not None:
            found[keystr(path)] = name in padding.columns
        elif is_of_targets(own_name):  # made of them
            found[keystr(path)] = any(map(is_of_targets, padding.columns))
        else:
            others |= padding.length in x.shape[1:]
    is_one_of_two = sum(each.length == padding.length for each in batch.paddings) > 1
    return None if others and is_one_of_two else found


def refuse_losses_of_other_rows(
    loss: Callable[..., torch.Tensor],
    given: tuple[Any, ...],
    losses: torch.Tensor,
    seed: int,
    *,
    goes_back: bool = True,
) -> None:
    """Raise ValueError if the losses of half of the rows change when these rows replace all others, for either half;
    or if the losses or gradients of a few rows are others when fewer of them are given.

    Args:
        loss: Returns the losses, whose first dimension is that of the rows, from what is ``given``.
        losses: What it returned.
        seed: Seeds the random numbers that a loss may draw, so that all computations draw the same.
        goes_back: Whether gradients are looked at, those of the numbers that are given. False where a model runs.
    """
    size = len(losses)
    if size < 2:
        return

    def computed(rows: tuple[Any, ...], seed: int = seed) -> torch.Tensor:
        with seeded_global_generators([seed], losses.device):
            return loss(*rows)

    def with_rows(*parts: slice) -> tuple[Any, ...]:
        def taken(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            has_rows = x.dim() and len(x) == size
            return torch.cat([x[part] for part in parts]).detach() if has_rows else x.detach()

        return tree_map(taken, given)

    half = (size + 1) // 2
    first, last, rest = slice(half), slice(size - half, size), size - half
    with torch.no_grad():
        own = computed(given).float()
        for kept, parts in ((first, (first, slice(rest))), (last, (slice(size - rest, size), last))):
            moved = computed(with_rows(*parts)).float()[kept]
            _refuse_unless(torch.allclose(moved, own[kept], rtol=1e-3, atol=1e-6, equal_nan=True))
    if not goes_back or size < 2 * _FEW or not _can_be_fewer(given, size):
        return
    have_rows = [len(x) == size for x in _numbers(given)]
    together, parts = slice(2 * _FEW), (slice(_FEW), slice(_FEW, 2 * _FEW))
    try:
        few = _with_gradients(computed, with_rows(together), have_rows)
        fewer = [_with_gradients(computed, with_rows(part), have_rows) for part in parts]
        with torch.no_grad():
            again = computed(with_rows(together), seed + 1)
            draws = not torch.equal(few[0], again.view_as(few[0]))  # for the rows that it is given
    except Exception as error:
        logger.info("the losses of fewer rows were not looked at: %s: %s", type(error).__name__, error)
        return
    if draws or any(len(each[0]) != _FEW for each in fewer):
        return
    for part, each in zip(parts, fewer, strict=True):
        for own, alone in zip(few, each, strict=True):
            moved_b = (alone.float() - own[part].float()).flatten(1).norm(dim=1)
            longest = own.float().flatten(1).norm(dim=1).max()
            _refuse_unless(bool((moved_b <= 1e-2 * longest + 1e-6).all()) or not bool(torch.isfinite(longest)))


def refuse_losses_of_padding(
    loss: Callable[..., torch.Tensor], args: tuple, kwargs: dict, batch: PhysicalBatch, padding: Padding, seed: int
) -> bool:
    """Raise ValueError if a row's loss, or its gradient, is another one with its padding than without. Whether that is
    known: some of what the loss is given is a column that is padded so, and all else with as many positions is cut
    like it.

    Args:
        loss: Returns the (B,) losses of what is given.
        seed: Seeds the random numbers that it may draw.
    """
    are_padded = _are_padded(padding, batch, args, kwargs)
    if not are_padded or not any(are_padded.values()):
        return False
    given = tree_leaves_with_path((args, kwargs))
    dims = {
        keystr(path): [d for d in range(1, x.dim()) if x.shape[d] == padding.length]
        for path, x in given
        if isinstance(x, torch.Tensor) and x.dim() > 1 and len(x) == batch.size and are_padded.get(keystr(path), True)
    }
    if any(len(each) > 1 for each in dims.values()):
        return False  # several classes happen to be as many as positions
    own_k = padding.own_t.nonzero().flatten()

    def row_of(path: tuple, x: Any, *, is_cut: bool) -> Any:
        """The row twice, since some losses cannot do with one."""
        if not (isinstance(x, torch.Tensor) and x.dim() and len(x) == batch.size):
            return x
        row = x.detach()[[padding.row] * 2]
        if not is_cut:
            return row
        if x.dim() == 1 and not x.is_floating_point():  # a length of all positions
            return row.where(row != padding.length, len(own_k))
        for dim in dims.get(keystr(path), ()):
            row = row.index_select(dim, own_k.to(row.device))
        return row

    def computed(seed: int, *, is_cut: bool) -> list[torch.Tensor]:
        rows = tree_map_with_path(partial(row_of, is_cut=is_cut), (args, kwargs))
        with seeded_global_generators([seed], tree_leaves(rows)[0].device):
            return _with_gradients(lambda rows: loss(*rows[0], **rows[1]), rows, [True] * len(_numbers(rows)))

    try:
        padded, alone, again = (
            computed(seed, is_cut=False),
            computed(seed, is_cut=True),
            computed(seed + 1, is_cut=False),
        )
    except Exception as error:
        logger.info("a row's loss was not computed without padding: %s: %s", type(error).__name__, error)
        return True
    if torch.equal(padded[0], again[0]):  # it draws no random numbers
        _refuse_unless_as_long(padded, alone)
    return True


def _refuse_unless_as_long(padded: list[torch.Tensor], alone: list[torch.Tensor]) -> None:
    """Raise ValueError unless losses and gradients are the same, but for zeros."""
    for x, y in zip(padded, alone, strict=True):
        precise = torch.float32 if x.dtype in (torch.float32, torch.float64) else x.dtype
        (own, _), (others, _) = (each.double().abs().flatten().sort(descending=True) for each in (x, y))
        missing = max(0, len(own) - len(others))
        moved = (own - F.pad(others, (0, missing)))[: len(own)].norm()
        if not moved <= 16 * torch.finfo(precise).eps * own.norm() and bool(own.isfinite().all()):
            raise ValueError(
                "an example's loss, or its gradient, is another one when it is padded to the length of a longer one "
                "of its batch, so every example has a say in the gradients of others, beyond the clipping bound: the "
                "criterion is a mean over padded positions, or adds them up. Pad targets with a number that it "
                "ignores (ignore_index), or leave padding out in a criterion of your own; or compute losses of shape "
                "(B,), each of its own positions, and call engine.clipper.backward(losses), with make_private(..., "
                "loss_reduction='none')."
            )


# Losses alone are looked at for all of this many physical batches, then ever more rarely, down to this rate.
OFTEN, RATE = 8, 1 / 64
RATE_OF_MODELS = 1 / 128  # where the model must run for it
_FEW = 2  # rows that are compared with as many more beside them


def _can_be_fewer(given: tuple[Any, ...], size: int) -> bool:
    """Whether it is known how to take fewer rows: all that has any are tensors whose first dimension they are."""

    def is_long(x: Any) -> bool:
        return isinstance(x, (list, tuple)) and len(x) == size

    for x in tree_leaves(given, is_leaf=is_long):
        if isinstance(x, torch.Tensor):
            if x.dim() and len(x) != size and {size, 2 * size} & {*x.shape}:
                return False
        elif not (x is None or isinstance(x, (bool, int, float, str))):
            return False
    return True


def _numbers(given: tuple[Any, ...]) -> list[torch.Tensor]:
    return [x for x in tree_leaves(given) if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dim()]


def _with_gradients(
    computed: Callable[[tuple], torch.Tensor], rows: tuple[Any, ...], have_rows: list[bool]
) -> list[torch.Tensor]:
    """The losses, and the gradients of their sum by the tensors that have rows (0 where there is none), of shape
    (B, numbers of a row)."""
    leaves = [x.requires_grad_() for x, has_rows in zip(_numbers(rows), have_rows, strict=True) if has_rows]
    with torch.enable_grad():
        losses = computed(rows)
    differentiable = losses.requires_grad and bool(leaves)
    found = torch.autograd.grad(losses.sum(), leaves, allow_unused=True) if differentiable else [None] * len(leaves)
    gradients = (torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True))
    return [x.reshape(len(x), -1) for x in (losses.detach(), *gradients)]


def _refuse_unless(same: bool) -> None:
    if not same:
        raise ValueError(
            "an example's loss, or its gradient, is another one when other examples share its batch: the loss "
            "compares them (the hardest of a batch, ranks, batch statistics, their number). Let "
            "per_example_loss_func, or the criterion, compute each loss from its own row of the outputs and labels, "
            "or of the inputs, alone."
        )
