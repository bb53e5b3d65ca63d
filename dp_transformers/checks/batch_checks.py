"""Checks of the batches that a training meets: clipping is exact for them, their padding changes no gradient, and
their losses do not compare examples."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..clipping import PerExampleClipper
from ..clipping.batch_dims import batch_size_of
from ..clipping.checks.synthetic import LossFunction
from ..clipping.errors import SelfCheckError
from ..clipping.ragged import tensors_with_rows
from ..data.draws import LogicalBatches, PhysicalBatch
from ..data.padding import Padding
from ..losses.heads import refuse_targets_padded_on_the_left
from ..runtime import distributed

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
        self._position_dims: dict[tuple, list[int | None]] = {}  # of outputs, by what is padded
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
            (args, kwargs, padding, batch.padded_arguments(padding, args, kwargs))
            for padding in batch.paddings
            if self._is_to_be_checked(padding)
        ]
        if not clipper.shards:
            for each in given:
                self._check_padding(*each, loss_function)
            return
        for _ in range(distributed.max_over_ranks(len(given), clipper.device)):
            args, kwargs, padding, padded_dims = distributed.broadcast_first(given.pop() if given else None)
            self._check_padding(args, kwargs, padding, padded_dims, loss_function)

    def _check_padding(
        self,
        args: tuple,
        kwargs: dict,
        padding: Padding,
        padded_dims: Mapping[str, tuple[int, ...]] | None,
        loss_function: LossFunction | None,
    ) -> None:
        if padded_dims is None:
            return
        clipper = self._clipper
        rows = batch_size_of(clipper.model, args, kwargs, clipper.batch_first)
        # rows that were packed since they were collated have no dimension of the padded length
        if any(padding.length in x.shape for x in tensors_with_rows((args, kwargs))):
            own_bt = torch.ones(rows, padding.length, dtype=torch.bool)
            own_bt[padding.row] = padding.own_t
            try:
                clipper.check_padding(args, kwargs, own_bt, loss_function, padding.row, padded_dims)
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
            self._position_dims[tuple(padding.columns or ())] = clipper.position_dims
        self._paddings.add(padding.kind)

    def expect_no_gradient_at_padding(self, batch: PhysicalBatch, output: Any) -> None:
        """Expect that the loss has no gradient at positions of the model's output that are a row's padding."""
        for padding in batch.paddings:
            dims = self._position_dims.get(tuple(padding.columns or ()))
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
