"""The one check that clipping is exact: rows of a real batch together, against each alone and unpadded.

Rows of different lengths are clipped together as they stand in their padded batch, and each goes alone and unpadded
through plain autograd (:mod:`.comparison`). Norms, clipped sum and losses must be the same, in float32 where the model
runs in it and with dropout off. A wrong rule, a parameter that no rule sees, a model or a loss that mixes rows or
reads padding: all of them differ. It runs before the first step; again when a row is shorter, or padded to more, than
any that was compared, or more rows come; and when the model was changed.

Before it, owners are found on the same rows (:mod:`.discovery`), with a canary: the modules of all owners see detached
copies of their parameters, so that a gradient which still reaches a parameter came by a use that no rule saw.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...runtime.randomness import forked_generators, global_state, random_state, same_global_state
from ..batch_dims import positions_of
from ..discovery import discover_owners
from ..engine import ClippingEngine
from ..errors import HOW_BATCH_NORM_MIXES, SelfCheckError, UnownedParameterError, UnsupportedModuleError, named
from ..owners import reassign_to_parents, warn_about_fallback
from ..precision import HALF
from .comparison import HOW_TO_FIND, Comparison, Errors, perturbed
from .float32 import in_float32_if_possible
from .rows import MOST, LossFunction, Rows, Sizes, columns_of, has_batch
from .without_dropout import evaluating, without_dropout

logger = logging.getLogger(__name__)
_PAIR = 2  # rows that are compared when lengths alone are new


Lengths = dict[tuple[str, int], tuple[int, int]]  # by column, those of the shortest and the longest row compared


def _extended(known: Lengths, lengths: Sizes) -> Lengths:
    """Return the shortest and the longest row of each column after these were compared, too."""
    found = dict(known)
    for column, own in columns_of(lengths):
        shortest, longest = found.get(column, (max(own), max(own)))
        found[column] = min(shortest, *own), max(longest, *own)
    return found


class Oracle:
    """Compares rows of the batches that a model is called with, when there is something new about them.

    Args:
        engine: Clips.

    Attributes:
        engine: It clips.
        has_compared: Whether the model as it is was compared.
        position_dims: In which dimension each of the model's outputs has padding, as far as that was seen.
    """

    def __init__(self, engine: ClippingEngine):
        self.engine = engine
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget what was compared: the model may compute otherwise now."""
        self.has_compared = False
        self.position_dims: dict[int, int] = {}
        # by kind of call, the most rows that were compared, and their lengths
        self._records: dict[Any, tuple[int, Lengths]] = {}

    def is_new(self, kind: Any, size: int, lengths: Sizes) -> int:
        """Return how many of ``size`` rows are to be compared: 0 if their lengths and number lie between those that
        were. All processes that share parameters call this together.

        Args:
            kind: Calls of one kind are given the same arguments.
            lengths: How they are padded, by columns.
        """
        most, known = self._records.get(kind, (0, {})) if self.has_compared else (0, {})
        count = MOST if min(size, MOST) > most else _PAIR if _extended(known, lengths) != known else 0
        shards = self.engine.trainable.shards
        return -shards.least(-count, self.engine.trainable.device) if shards else count

    def compare(self, kind: Any, rows: Rows, count: int, lengths: Sizes, losses_of: LossFunction | None) -> Errors:
        """Compare ``count`` rows of all lengths.

        Raises:
            SelfCheckError: norms, losses or the clipped sum are others than those of the rows alone.
        """
        engine, chosen = self.engine, rows.spread(count)
        if rows.only(chosen).are_ambiguous:
            chosen = chosen[1:]
        trainable = engine.trainable
        with forked_generators(trainable.device), _named_causes(engine), engine.trial():
            if trainable.shards or trainable.parallel:  # processes that share parameters must decide alike
                trainable.parallel.require_same((rows.args, rows.kwargs), random_state(trainable.device))
                rows, chosen = trainable.shards.broadcast_inputs((rows, chosen), trainable.device)
                torch.manual_seed(0)
            errors = self._compared(rows, chosen, losses_of)
            if not errors.are_small:
                self._refuse(rows, chosen, errors)
        warn_about_fallback(engine.owners)
        self.has_compared = True
        most, known = self._records.get(kind, (0, {}))
        self._records[kind] = max(most, min(rows.size, MOST) if count > _PAIR else 0), _extended(known, lengths)
        return errors

    def compare_owners(self, kind: Any, rows: Rows, lengths: Sizes, losses_of: LossFunction | None) -> None:
        """Find owners once more, on rows that reach a module which no others did, and compare these. What was compared
        before stays compared.

        Raises:
            SelfCheckError: as :meth:`compare`.
        """
        self.has_compared = False
        self.compare(kind, rows, MOST, lengths, losses_of)

    def _compared(self, rows: Rows, chosen: list[int], losses_of: LossFunction | None) -> Errors:
        """Compare in float32 if the model runs in it, and before the first step as it trains, too."""
        precise = rows.changed(lambda path, x: x.float() if isinstance(x, torch.Tensor) and x.dtype in HALF else x)
        given = Comparison(self.engine, precise, chosen, losses_of)
        found, is_other = in_float32_if_possible(self.engine, given.loss_of_first, lambda: self._in_modes(given))
        if found is None or (found.are_small and is_other and not self.has_compared):
            given = Comparison(self.engine, rows, chosen, losses_of)
            as_trained = self._in_modes(given)
            found = found if found is not None and as_trained.are_small else as_trained
        self.position_dims = given.position_dims or self.position_dims
        return found

    def _in_modes(self, given: Comparison) -> Errors:
        """Compare in the mode that the model is in, without dropout. If other random numbers are drawn there, a row
        has not the same ones alone, and reentrant checkpointing shows no gradient of one; then the model must
        evaluate."""
        engine, device, errors = self.engine, self.engine.trainable.device, None
        with perturbed(engine), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
            before = global_state(device)
            try:
                errors = self._discovered(given)
            except RuntimeError as error:
                if not _is_reentrant(error):
                    raise
                engine.begin_anew()
            is_drawn = not same_global_state(before, global_state(device))
            if errors is not None and (errors.are_small or not (is_drawn or given.is_reentrant)):
                return errors
            with evaluating(engine.model):
                try:
                    return self._discovered(given) if errors is None else given.run()
                except Exception as error:
                    if errors is None or isinstance(error, torch.OutOfMemoryError):
                        raise
                    engine.trainable.shards.recover()  # it goes backward in training alone, as Reformer
                    return errors

    def _discovered(self, given: Comparison) -> Errors:
        """Find the owners, if that was not done, and compare. Parents own what modules hold that turn out not to be
        re-runnable; where the parents are not either, the error is that of the module that began it."""
        engine = self.engine
        first: UnsupportedModuleError | None = None
        while True:
            if not self.has_compared or first is not None:
                with without_dropout():
                    _discover(engine, given)
            try:
                return given.run()
            except UnsupportedModuleError as error:
                engine.trainable.shards.recover()
                engine.trainable.thaw()
                is_parent = any(owner.module is error.module and owner.covers_children for owner in engine.owners)
                first = first if is_parent and first else error
                try:
                    reassign_to_parents(engine.model, engine.owners, error.module)
                except UnownedParameterError:
                    raise first from (None if first is error else error)

    def _refuse(self, rows: Rows, chosen: Sequence[int], errors: Errors) -> None:
        """Raise SelfCheckError that says what the reason may be. It has no figure of any row."""
        where = f"{type(self.engine.model).__name__} in mode '{self.engine.mode.name}'"
        wrong_b, padded_b = errors.wrong_b.tolist(), [rows.is_padded(i) for i in chosen]
        own = {padded for wrong, padded in zip(wrong_b, padded_b, strict=True) if wrong}
        others = {padded for wrong, padded in zip(wrong_b, padded_b, strict=True) if not wrong}
        if own == {True} and False in others:
            raise SelfCheckError(
                f"an example's gradient or loss is another one when it is padded to the length of a longer one of its "
                f"batch ({where}), or the model or its loss mixes examples by what is in the longest. {HOW_TO_PAD} "
                f"{HOW_TO_FIND}."
            )
        or_padding = f" Or it reads padding: {HOW_TO_PAD}" if any(padded_b) else ""
        if not errors.wrong_losses_b.any():
            raise SelfCheckError(
                f"an example has another gradient beside other examples than alone, though its loss is the same, so "
                f"clipping is not exact for {where}: a rule is wrong for a module, or a backward pass that is not "
                "autograd's own mixes examples, or draws other random numbers when it runs again. Freeze your own "
                f"modules one by one until this passes, and report that one.{or_padding}"
            )
        raise SelfCheckError(
            f"an example has another loss beside other examples than alone, so clipping is not exact for {where}: the "
            "model or its loss mixes examples (batch statistics, a condition or a maximum over the batch, a loss that "
            "compares rows or averages over the batch's tokens), or draws random numbers that are other ones when it "
            f"runs again. {HOW_TO_FIND}: compute each row from itself alone, and choose by a mask (torch.where)."
            f"{or_padding}"
        )


HOW_TO_PAD = (
    "Return an attention_mask, pad on the other side (padding_side), or all examples to one length "
    "(padding='max_length'), pad targets with what the loss ignores (-100, label_pad_token_id), count position_ids "
    "from the mask, pack the input of a recurrent model (pack_padded_sequence), or leave padding out of your own loss."
)


def _discover(engine: ClippingEngine, given: Comparison) -> None:
    """Find the owners on these rows, so that every use of every parameter is seen by a module whose outputs have a
    batch."""
    rows, trainable = given.together, engine.trainable
    taken = {n for x in rows.tensors if has_batch(x, rows.size) for n in x.shape[1:]}
    size, other_size, *_ = (n for n in range(3, 3 + 2 * len(taken) + 4, 2) if n not in taken)
    given_first = rows.only([j % rows.size for j in range(size)])
    # copies of one row, so that the tokens which an expert takes do not grow as the rows do
    copies = rows.only([-1] * other_size)

    def plain(n: int, is_padded: bool, is_same: bool) -> torch.Tensor:
        batch = given_first if n == size else copies
        with engine.suspended():
            return given.losses_of_rows(_changed(batch, is_padded=is_padded, is_same=is_same))

    def tapped() -> None:
        engine.install_hooks()
        try:
            given.losses_of_rows(given_first)
        except BaseException:
            trainable.shards.recover()
            raise

    try:
        # positions are not looked for where they come before the examples: flattened rows would not lie example by
        # example
        positions = positions_of(rows.args, rows.kwargs, rows.size) if engine.batch_first else set()
        sizes, parameters = (size, other_size), trainable.parameters
        discover_owners(engine.model, engine.owners, parameters, plain, tapped, sizes, positions, trainable.shards)
    except UnownedParameterError as error:
        raise SelfCheckError(str(error)) from None
    finally:
        engine.forget()
        engine.install_hooks()


def _changed(rows: Rows, *, is_padded: bool, is_same: bool) -> Rows:
    """Return rows in other arguments. Those that are the same hold their first number everywhere, and masks leave
    nothing out. Of those that are padded, the first one's masks end a position earlier, so that a model which drops
    padding before it computes is seen to do so."""

    def change(path: tuple, x: Any) -> Any:
        if not has_batch(x, rows.size) or x.dim() < 2 or not x.numel():
            return x
        is_mask = "mask" in rows.name_of(path)
        if is_same:
            is_all = is_mask or x.dtype == torch.bool
            x = torch.ones_like(x) if is_all else x.reshape(-1)[0].expand_as(x).clone()
        if is_padded and is_mask:
            x = x.clone()
            x[0, ..., -1] = 0
        return x

    return rows.changed(change)


def _is_reentrant(error: BaseException) -> bool:
    """Return True if torch says that reentrant checkpointing gives no gradients of one example."""
    return "checkpoint" in str(error).lower() and ".grad()" in str(error)


@contextlib.contextmanager
def _named_causes(engine: ClippingEngine) -> Iterator[None]:
    """Inside, a check that fails for a reason which people know by another name raises an error that says that
    name."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        engine.trainable.shards.recover()
        if _is_reentrant(error):
            raise SelfCheckError(
                "a part of the model runs under reentrant activation checkpointing, which gives no gradients of one "
                "example: call torch.utils.checkpoint.checkpoint with use_reentrant=False."
            ) from error
        for path, module in engine.model.named_modules():
            if isinstance(module, _BatchNorm) and module.training:
                raise SelfCheckError(f"{named(path, module)} {HOW_BATCH_NORM_MIXES}") from error
            is_second = isinstance(module, (nn.MultiheadAttention, nn.RNNBase)) and not module.batch_first
            if is_second and engine.batch_first and isinstance(error, SelfCheckError):
                raise SelfCheckError(
                    f"{error} {named(path, module)} has batch_first=False: if your loop gives it the batch in the "
                    "second dimension, say batch_first=False to make_private too; if in the first, it takes examples "
                    "for positions, and mixes them: build it with batch_first=True."
                ) from error
        raise
