"""Rows that hold data of several examples (MixUp, CutMix, normalisation over the batch): clipping by row bounds none
of them."""

from __future__ import annotations

import functools
import numbers
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

from .ragged import bag_columns, is_ragged, unpacked_sequence, with_rows_for_bags
from .rows import Collate, copied, leaves, size_of


def refuse_mixed(
    collate: Collate, examples: Sequence[Any], reseed: Callable[[str], None], *, who: str = "collator"
) -> None:
    """Raise ValueError unless each row that ``collate`` makes is one of its own example and of secret random numbers
    alone.

    * Made again from the same secret, a batch is the same: otherwise random numbers come from where they may be known.
    * With one example replaced, all other rows are the same (MixUp, CutMix, normalisation over the batch, rows put in
      another order than labels).
    * Where numbers were drawn, no row changes with one example and with another one (sequences packed into one row).
    * Where no numbers were drawn from the secret, the same holds with one example left out: rows do not depend on
      their position either, as they do by numbers from a known seed.

    ``collate`` gives a batch, or a list with a row for each example. ``reseed`` seeds the random generators for a
    purpose.
    """

    whole = sorted(examples, key=size_of)
    _refuse_mixed(collate, whole if len(whole) > 2 else [*whole, whole[-1]], reseed, who)
    _refuse_mixed(collate, [whole[0], whole[-1], whole[-1]], reseed, who)  # most different in length


def _refuse_mixed(collate: Collate, whole: list[Any], reseed: Callable[[str], None], who: str) -> None:
    bags: tuple[str, list[str]] | None = None

    def made(part: list[Any], purpose: str = "mixing") -> dict[str, torch.Tensor]:
        reseed(purpose)
        try:
            return with_rows_for_bags(_tensors(collate([copied(row) for row in part])), len(part), bags)
        except ValueError:  # says itself what is wrong
            raise
        except Exception as error:
            raise ValueError(
                f"the {who} raised {type(error).__name__} ({error}) for examples of a draw. If it does so for every "
                "batch, correct it or the data. If not: private training also calls it with an example left out or "
                "given twice, to see that each row is made of its own example, so let it make one row of every "
                "example that it is given, whatever the others are."
            ) from error

    batch, without_first = made(whole), made(whole[1:])
    if not _agree(batch, made(whole)):
        raise ValueError(
            f"the {who} gives another batch when it is called again with the same examples and the same seeds: it "
            "keeps state, or has random generators that private training does not find, whose numbers somebody may "
            "know. Let it draw from the global generators of torch, NumPy or Python, or keep its generator as an "
            "attribute, and keep nothing from batch to batch."
        )
    # those of later rows may depend on how many earlier rows took
    drew = not _agree(batch, made(whole, "mixing, with other numbers"))
    bags = bag_columns([(batch, len(whole)), (without_first, len(whole) - 1)])
    batch = with_rows_for_bags(batch, len(whole), bags)
    without_first = with_rows_for_bags(without_first, len(whole) - 1, bags)
    rows_in = _dims_of_rows(batch, without_first, len(whole))
    first, *between, last = whole
    if drew:
        _refuse_shared_rows(batch, whole, made, rows_in, who)
    edits = [([*whole[:-1], first], len(whole) - 1), ([first] * len(whole), 1)]  # and how many rows stay
    if not drew:
        edits += [([last, *between, last], len(whole) - 1), ([last] * len(whole), 1)]
    if changed := next(
        (name for part, stay in edits for name in _with_other_rows(batch, made(part), rows_in, stay)), None
    ):
        raise ValueError(
            f"the {who} mixes examples: '{changed}' of a row changes when another example of its batch is replaced "
            "(MixUp, CutMix, normalisation over the batch, rows cut to the shortest or put in another order than "
            "their labels). Such a row holds several people's data, and clipping rows would not bound what one "
            f"example can change. Remove the mixing from the {who}: augment each example by itself, pad rows to the "
            "longest instead of cutting them, and keep them in the order of their labels."
        )
    if not drew and (changed := next(_with_other_rows(batch, without_first, rows_in, len(whole) - 1), None)):
        raise ValueError(
            f"'{changed}' of a row that the {who} makes depends on how many examples come before it, and not on the "
            "secret seeds of private training: its random numbers come from a seed that is set in it, or it mixes "
            "examples. Remove the seed, so that it draws from the global generators of torch, NumPy or Python."
        )


def _refuse_shared_rows(
    batch: dict[str, torch.Tensor],
    whole: list[Any],
    made: Callable[[list[Any]], dict[str, torch.Tensor]],
    rows_in: dict[str, int],
    who: str,
) -> None:
    """Raise ValueError if one row of the batch, and no other, changes with one of its last examples, and with another
    one. Each is replaced by an example of its size, so that the numbers that are drawn for others are the same."""
    rows: set[int] = set()
    for place in range(len(whole) - 1, max(0, len(whole) - 1 - _SHARING), -1):
        others = [x for x in whole if x is not whole[place]]
        same_size = [x for x in others if size_of(x) == size_of(whole[place])]
        found = _rows_found(batch, made([*whole[:place], (same_size or others)[0], *whole[place + 1 :]]), rows_in)
        changed = [] if found is None else (~found).nonzero().flatten().tolist()
        if len(changed) == 1 and changed[0] in rows:
            raise ValueError(
                f"the {who} makes one row of several examples (sequences packed into one), and clipping rows would "
                f"not bound what one example can change. Let the {who} make one row of every example."
            )
        rows |= {*changed} if len(changed) == 1 else set()


_SHARING = 3  # examples of which it is seen whether they share a row


def _rows_found(
    whole: dict[str, torch.Tensor], part: dict[str, torch.Tensor], rows_in: dict[str, int]
) -> torch.Tensor | None:
    """(B,) bool, which rows of ``whole`` are rows of ``part`` in all columns, beside padding; None where no column can
    be compared."""
    together: torch.Tensor | None = None
    for name, dim in rows_in.items():
        if name not in part or part[name].dim() != whole[name].dim():
            continue
        x, y = whole[name].movedim(dim, 0), part[name].movedim(dim, 0)
        if x.shape[1:] != y.shape[1:]:
            if x.dim() != 2 or not x.shape[1] or not y.shape[1]:
                continue
            x, y = _as_long(x, y), _as_long(y, x)
        x, y = x.reshape(len(x), 1, -1), y.reshape(1, len(y), -1)
        same = ((x == y) | ((x != x) & (y != y))).all(2)
        together = same if together is None else together & same
    return None if together is None else together.any(1)


def _as_long(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``x`` of shape (B, T), whose rows go on as they end until they are as long as those of ``y``."""
    return torch.cat([x, x[:, -1:].expand(-1, max(0, y.shape[1] - x.shape[1]))], 1)


def refuse_state(dataset: Any, before: Sequence[Any], after: Sequence[Any]) -> None:
    """Raise ValueError unless rows that ``dataset`` gave are the same rows that it gave later, with the same seeds."""
    for row, again in zip(before, after, strict=True):
        found, found_again = dict(leaves(row)), dict(leaves(again))
        changed = sorted(found.keys() ^ found_again.keys()) or [
            name for name, x in found.items() if not _is_same(x, found_again[name])
        ]
        if changed:
            raise ValueError(
                f"the data set ({type(dataset).__name__}) gives another row when it is asked for it again, with the "
                f"same seeds and after other rows ('{changed[0]}'): it keeps state (a running mean, the largest "
                "number so far, the row before), so that a row holds several people's data, or it has random "
                "generators that private training does not find, whose numbers somebody may know. Let what it returns "
                "for an index depend on that index alone, and let it draw from the global generators of torch, NumPy "
                "or Python, or keep its generator as an attribute."
            )


def _is_same(x: Any, y: Any) -> bool:
    """Whether two things in a row are the same, as far as they are numbers, tensors, words or images."""
    if isinstance(x, torch.Tensor):
        return isinstance(y, torch.Tensor) and (x.layout != torch.strided or x.is_nested or _equal(x, y))
    if isinstance(x, (str, bytes, numbers.Number)):
        return bool(x == y or (x != x and y != y))
    if hasattr(x, "tobytes") and not isinstance(x, np.ndarray):  # an image of PIL
        return hasattr(y, "tobytes") and x.tobytes() == y.tobytes()
    return True


def refuse_reordered(batch: Any, other: Any, examples: int, size: int) -> bool:
    """Whether the last rows of two batches, made of the same examples and of other fillers behind them, are seen to
    differ. They then are the fillers: the rows before them are the same in both, so they are the examples.

    Args:
        examples: How many rows of each batch must be those of the examples.
        size: The number of rows in each batch.

    Raises:
        ValueError: the first ``examples`` rows are not the same, or nothing can be compared.
    """
    ours, others = _tensors(batch), _tensors(other)
    bags = bag_columns([(ours, size), (others, size)])
    ours, others = with_rows_for_bags(ours, size, bags), with_rows_for_bags(others, size, bags)
    compared, differ_f = False, torch.zeros(size - examples, dtype=torch.bool)
    for name, x in ours.items():
        y, dims = others.get(name), [dim for dim in range(min(2, x.dim())) if x.shape[dim] == size]
        if y is None or x.shape != y.shape or not dims:
            continue
        compared = True
        same_b = next((same for dim in dims if bool((same := _same_rows(x, y, dim))[:examples].all())), None)
        if same_b is None:
            raise ValueError(
                f"the collator puts rows in another order than that of the examples ('{name}'), or what it makes of "
                "an example depends on those that follow it, so the rows that fill a batch up cannot be told from "
                "examples. Let it keep the order (sort inside the model if it needs that), or set "
                "fill_physical_batches=False."
            )
        differ_f |= ~same_b[examples:]
    if not compared:
        raise ValueError(
            f"no tensor that the collator returns has a row for each of the {size} rows of a filled batch, so the "
            "rows that fill it up cannot be told from examples. Return a dictionary, a tuple or a dataclass of "
            "tensors, or set fill_physical_batches=False."
        )
    return bool(differ_f.all())


def _same_rows(x: torch.Tensor, y: torch.Tensor, dim: int) -> torch.Tensor:
    """(B,) bool: which rows along ``dim`` are the same."""
    same = ((x == y) | ((x != x) & (y != y))).movedim(dim, 0)
    return same.reshape(len(same), -1).all(1).cpu()


def _tensors(batch: Any) -> dict[str, torch.Tensor]:
    """The tensors of a batch. A list is one that default_collate makes of tuples, or has a row for each example."""
    columns = _as_batch(batch) if isinstance(batch, list) else {}
    batch = {"batch": batch} if isinstance(batch, list) else dict(batch) if isinstance(batch, Mapping) else batch
    found = leaves(tree_map(unpacked_sequence, batch, is_leaf=is_ragged))
    return columns | {name: x for name, x in found if isinstance(x, torch.Tensor) and x.dim()}


def _as_batch(examples: list[Any]) -> dict[str, torch.Tensor]:
    """Columns of rows that have one shape; others are left out."""
    columns: dict[str, list[Any]] = {}
    for example in examples:
        named = (
            example.items()
            if isinstance(example, Mapping)
            else enumerate(example if isinstance(example, (tuple, list)) else [example])
        )
        for name, x in named:
            columns.setdefault(str(name), []).append(x)
    batch = {}
    for name, column in columns.items():
        try:
            batch[name] = torch.stack([torch.as_tensor(x) for x in column])
        except (TypeError, ValueError, RuntimeError):
            continue
    return batch


def _dims_of_rows(whole: dict[str, torch.Tensor], without_first: dict[str, torch.Tensor], size: int) -> dict[str, int]:
    """In which dimension of each column the examples are."""
    dims = {}
    for name in whole.keys() & without_first.keys():
        x, y = whole[name], without_first[name]
        found = next(
            (d for d in range(min(2, x.dim(), y.dim())) if (x.shape[d], y.shape[d]) == (size, size - 1)), None
        )
        if found is not None:
            dims[name] = found
    return dims


def _with_other_rows(
    whole: dict[str, torch.Tensor], part: dict[str, torch.Tensor], rows_in: dict[str, int], stay: int
) -> Iterator[str]:
    """Columns of ``whole`` of whose rows fewer than ``stay`` are rows of ``part``, made of some of its examples, in
    whatever order.

    Columns may be shorter in ``part``, where the longest example is not among its own; none is longer, unless rows are
    cut to the shortest.
    """
    together: torch.Tensor | None = None
    for name, dim in rows_in.items():
        if name not in part or part[name].dim() != whole[name].dim():
            continue
        x, y = whole[name].movedim(dim, 0), part[name].movedim(dim, 0)
        if x.shape[1:] == y.shape[1:]:
            x, y = x.reshape(len(x), 1, -1), y.reshape(1, len(y), -1)
            same = ((x == y) | ((x != x) & (y != y))).all(2)
            together = same if together is None else together & same  # the columns of a row stay together
            if int(together.any(1).sum()) < stay:
                yield name
                return
        elif any(map(operator.lt, x.shape[1:], y.shape[1:])):
            yield name
            return


def _agree(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(x, b[name]) or _equal(x, b[name]) for name, x in a.items())


def _equal(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.shape == y.shape and bool(((x == y) | ((x != x) & (y != y))).all())


_COLUMNS = 256  # numbers of each row that are looked at
_ROWS = 32  # rows of the model's input that are looked at
_TINY = torch.finfo(torch.float64).tiny
_IDS = (torch.int32, torch.int64)
_FEWEST = 8  # numbers that must agree before two rows are said to have something in common


class _Column(NamedTuple):
    """A tensor of a batch as it was loaded, with some numbers of each of its rows."""

    x: torch.Tensor
    version: int
    width: int
    numbers_bk: torch.Tensor


class LoadedRows:
    """Some numbers of every row of a batch: rows that were made of several of them since are refused.

    Seen are a sum of two rows with any weights, parts of one row in another, a row that is there twice, features
    whose mean over the batch was taken off, and factors that follow the batch (:class:`Scalings`), in floating-point
    tensors with as many numbers a row as the batch has.
    Labels and losses are not seen, and of whole numbers (tokens) only that the rows come in several orders.
    """

    def __init__(self, batch: Any, size: int, scalings: Scalings | None = None):
        """``batch`` has ``size`` examples in the first or second dimension of its tensors. ``scalings`` says how other
        batches were changed; None where they are not compared."""
        self._size, self._scalings = size, scalings
        self._kept = [
            _Column(x, x._version, rows_bn.shape[1], _sample(rows_bn)) for x, rows_bn in _by_row(batch, size)
        ]
        self._order: list[int] | None = None  # which loaded rows those of the model's input were
        self._first_ids: list[tuple[torch.Tensor, torch.Tensor]] | None = None  # of the first call
        self._loaded_ids = [(found, found[0]._version) for found in _by_row(batch, size, of_ids=True)]

    @classmethod
    def of_examples(cls, examples: Sequence[Any]) -> LoadedRows:
        """Of examples that are not collated yet, where they have arrays or tensors of one shape."""
        return cls(_columns_of(examples), len(examples))

    def refuse_mixed(self, made: Any, who: str) -> bool:
        """Raise ValueError if rows of what ``who`` made hold parts of other rows than their own. Whether rows are seen
        to be other ones than they were."""
        untouched = {id(column.x): i for i, column in enumerate(self._kept) if column.x._version == column.version}
        changed = False
        for place, (x, rows_bn) in enumerate(_by_row(made, self._size) if self._kept else ()):
            if id(x) in untouched:
                self._require_order(list(range(self._size)), who)
                self._compare_scaling(place, untouched[id(x)], None, x, who)
                continue
            if not x.is_floating_point():
                continue
            made_bk = _sample(rows_bn)
            alike = {i: column.numbers_bk for i, column in enumerate(self._kept) if column.width == rows_bn.shape[1]}
            same = next((i for i, loaded_bk in alike.items() if torch.equal(made_bk, loaded_bk)), None)
            if same is not None:
                self._require_order(list(range(self._size)), who)
                self._compare_scaling(place, same, None, x, who)
                continue
            changed = True
            for loaded_bk in alike.values():
                self._require_order(_order_by_likeness(made_bk, loaded_bk), who)
            if any(_is_mixed(made_bk, loaded_bk) for loaded_bk in alike.values()):
                raise ValueError(
                    f"the {who} mixes examples: a row holds parts of other rows, as MixUp, CutMix and normalisation "
                    "over the batch make them, or is there twice. Clipping would then not bound what one example can "
                    f"change. Remove the mixing from the {who}, and augment each example by itself."
                )
            for i in alike:
                self._compare_scaling(place, i, made_bk, x, who)
        self._compare_ids(made, who)
        return changed

    def _compare_scaling(self, place: int, i: int, made_bk: torch.Tensor | None, x: torch.Tensor, who: str) -> None:
        """Compare how the ``i``-th loaded column became ``x`` with other batches, in the first call of the model."""
        if self._scalings is None or self._first_ids is not None or self._size < _VALUES:
            return
        column = self._kept[i]
        # at the same positions whatever the length of the first dimension of a row
        kind = (place, i, column.x.shape[2:], column.width.bit_length())
        self._scalings.require_same(
            kind, column.numbers_bk, made_bk, torch.finfo(x.dtype).eps if made_bk is not None else 0, who
        )

    def _require_order(self, order: list[int] | None, who: str) -> None:
        """Raise ValueError if the rows are known to be in another order than those of another input of this batch."""
        if order is None:
            return
        if self._order not in (None, order):
            raise ValueError(
                f"the {who} gives the model the rows of one batch in several orders (x, and x.roll(1, 0) or x[perm]), "
                "so that one row of what is clipped is made of several examples, and clipping would not bound what "
                "one example can change. Keep one order in all forward passes of a batch and in all that the model is "
                "given. Losses that compare examples (negatives from the batch) cannot be trained privately by "
                "example: let the data set give each example its own negatives."
            )
        self._order = order

    def _compare_ids(self, made: Any, who: str) -> None:
        """Look at the order of whole numbers once the model is called a second time on the batch: the first call alone
        need not wait for the device."""
        ids = _by_row(made, self._size, of_ids=True)
        if self._first_ids is None:
            self._first_ids = ids
            return
        loaded = [(x, rows_bn) for (x, rows_bn), version in self._loaded_ids if x._version == version]
        first, self._first_ids = self._first_ids, []
        for x, rows_bn in [*first, *ids]:
            alike = [(y, y_bn) for y, y_bn in loaded if y_bn.shape == rows_bn.shape]
            x_bn = rows_bn.cpu()
            if any(x is y or torch.equal(x_bn, y_bn.cpu()) for y, y_bn in alike):
                self._require_order(list(range(self._size)), who)
                continue
            for _, y_bn in alike:
                self._require_order(_order_by_equality(x_bn, y_bn.cpu()), who)


_POSITIONS = 16  # of each row at which batches are compared
_VALUES = 4  # so many different numbers at a position do not lie on a line by accident
_SINGLE = torch.finfo(torch.float32).eps


@dataclass
class _Scaling:
    """Of one column. ``line`` is (5, K), see :func:`_line`; ``alike`` counts the batches whose rows were all changed
    alike, less those where they were not."""

    line: np.ndarray
    alike: int = 0


class Scalings:
    """By which factors, and with what added, the rows of loaded columns become what the model is called with.

    Where these numbers are the same for all rows of a batch, at one position, they must be so for all batches: if they
    are not, they follow the batch (its largest number, its mean), and one example changes all rows. Functions of each
    row by itself may be the same for the few rows of a batch by chance, so that they must be the rule.

    Args:
        has_drawn: Whether a global random generator was drawn from since the batch was handed out. Such a batch may
            have been augmented as a whole, and is not compared.
    """

    def __init__(self, has_drawn: Callable[[], bool]):
        self._has_drawn, self._seen = has_drawn, dict[Any, _Scaling]()

    def require_same(
        self, kind: Any, loaded_bk: torch.Tensor, made_bk: torch.Tensor | None, eps: float, who: str
    ) -> None:
        """Raise ValueError if the rows of a column were changed otherwise than those of another batch.

        Args:
            kind: Names the column and its place in the call.
            loaded_bk, made_bk: (B, at least K) float64, the numbers before and after; None: they are the same.
            eps: The precision of the numbers after.
        """
        seen = self._seen.setdefault(kind, _Scaling(_UNKNOWN if made_bk is not None else _UNCHANGED))
        if made_bk is None and seen.line is _UNCHANGED:
            seen.alike += 1
            return
        x_bk = loaded_bk[:, :_POSITIONS].numpy()
        y_bk = x_bk if made_bk is None else made_bk[:, :_POSITIONS].numpy()
        with np.errstate(all="ignore"):  # what is not known, and numbers that are not finite, compare as false
            line = _UNCHANGED if made_bk is None else _line(x_bk, y_bk, eps)
            is_other_k = _is_other(seen.line, line, x_bk, y_bk)
        is_line_k, is_known_k = ~np.isnan(line[2]), ~np.isnan(seen.line[2])
        varies, lines, other = np.sum(~np.isnan(line[0])), np.sum(is_line_k), np.sum(is_other_k)
        both = np.sum(is_line_k & is_known_k)
        is_alike = lines >= max(_VALUES, 0.75 * varies)
        if varies < _VALUES or (not (is_alike and both and not other) and self._has_drawn()):
            return
        seen.alike += 1 if is_alike else -1
        if is_alike and other and 2 * other >= both and seen.alike > 0:
            raise ValueError(
                f"the {who} normalises over the batch: what the rows are multiplied with, or what is added to them, "
                "is the same for all rows of a batch and another one than in an earlier batch, so that it follows "
                "the other rows (x / x.max(), (x - x.mean()) / x.std(), x / 255 if x.max() > 1). Clipping would then "
                "not bound what one example can change. Use constants that do not depend on private rows (known "
                "ones, or computed on public data), or normalise each row by itself. Let an augmentation draw from "
                "the global generators of torch, NumPy or Python. If this is a schedule, set its number on the "
                "model, by the number of the step, and multiply there."
            )
        if is_alike:
            seen.line = line if line is _UNCHANGED else np.where(is_known_k, seen.line, line)


_UNKNOWN = np.full((5, _POSITIONS), np.nan)
_UNCHANGED = np.repeat([[0.0], [0.0], [1.0], [np.inf], [0.0]], _POSITIONS, 1)


def _line(x_bk: np.ndarray, y_bk: np.ndarray, eps: float) -> np.ndarray:
    """(5, K): the centre of the numbers ``x`` at each position, the value there of the line through all (x, y), its
    slope, the spread of ``x``, and by how much rounding may change y. NaN from the slope on where the numbers lie on
    no line, and everywhere where few of them are different."""
    x_max_k, y_max_k = np.abs(x_bk).max(0), np.abs(y_bk).max(0)
    centre_k, value_k = x_bk.mean(0), y_bk.mean(0)
    x0_bk = x_bk - centre_k
    spread_k = np.sqrt((x0_bk**2).mean(0))
    slope_k = (x0_bk * (y_bk - value_k)).mean(0) / spread_k**2
    error_k = (8 * _SINGLE + eps) * (np.abs(slope_k) * x_max_k + y_max_k)
    is_line_k = (np.abs(value_k + slope_k * x0_bk - y_bk) <= error_k).all(0)
    varies_k = np.isfinite(x_max_k + y_max_k) & (_values(x_bk) >= _VALUES) & (_values(y_bk) >= _VALUES)
    line = np.stack([centre_k, value_k, slope_k, spread_k, error_k])
    line[2:, ~is_line_k] = np.nan
    line[:, ~varies_k] = np.nan
    return line


def _values(x_bk: np.ndarray) -> np.ndarray:
    """(K,): how many numbers are different, of some at each position."""
    ordered = np.sort(x_bk[:_ROWS], 0)
    return 1 + (ordered[1:] != ordered[:-1]).sum(0)


def _is_other(known: np.ndarray, line: np.ndarray, x_bk: np.ndarray, y_bk: np.ndarray) -> np.ndarray:
    """(K,) bool, where the numbers are further from the line that is known than rounding explains."""
    centre_k, value_k, slope_k, spread_k, error_k = known
    from_centre_bk = x_bk - centre_k
    allowed_bk = error_k * (1 + np.abs(from_centre_bk) / spread_k) + line[4]
    return (np.abs(value_k + slope_k * from_centre_bk - y_bk) > allowed_bk).any(0)


def _columns_of(examples: Sequence[Any]) -> list[torch.Tensor]:
    if not examples or isinstance(examples[0], (str, bytes)):
        return []
    first = examples[0]
    keys = (
        list(first)
        if isinstance(first, Mapping)
        else range(len(first))
        if isinstance(first, (tuple, list))
        else [None]
    )
    columns = ([example if key is None else example[key] for example in examples] for key in keys)
    return [
        torch.stack([torch.as_tensor(x) for x in column])
        for column in columns
        if all(
            isinstance(x, (torch.Tensor, np.ndarray)) and x.shape == column[0].shape and x.dtype == column[0].dtype
            for x in column
        )
        and len(column[0].shape)
    ]


def _by_row(batch: Any, size: int, *, of_ids: bool = False) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Sounds, images and other tensors with many numbers for each of several examples, and each as (B, N); or, instead
    of these, as many whole numbers, such as tokens."""
    found = []
    for x in tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch):
        if not isinstance(x, torch.Tensor) or size < 2:
            continue
        is_wanted = x.dtype in _IDS if of_ids else x.is_floating_point() or x.dtype == torch.uint8
        if is_wanted and x.numel() >= (1 if of_ids else 2) * _FEWEST * size:
            rows_in = next((d for d in range(min(2, x.dim())) if x.shape[d] == size), None)
            if rows_in is not None:
                found.append((x, x.detach().movedim(rows_in, 0).flatten(1)))
    return found


def _sample(x_bn: torch.Tensor) -> torch.Tensor:
    """Some columns, the same of all that have as many, as (B, K) float64 on the CPU."""
    return x_bn[:, _columns(x_bn.shape[1]).to(x_bn.device)].cpu().double()


@functools.lru_cache(maxsize=8)
def _columns(width: int) -> torch.Tensor:
    """The first ones are the same for all widths that are as long in binary."""
    first, others = (
        torch.randperm(n, generator=torch.Generator().manual_seed(0))[:_COLUMNS]
        for n in (2 ** (width.bit_length() - 1), width)
    )
    first = first[:_POSITIONS]
    return torch.cat([first, others[~torch.isin(others, first)]])[:_COLUMNS]


def _order_by_equality(x_bn: torch.Tensor, y_bn: torch.Tensor) -> list[int] | None:
    """Which row of ``y`` each row of ``x`` equals; None where that is not one of its own for each, or where rows have
    much in common by chance, as masks do."""
    same_bb = torch.stack([(row_n == y_bn).all(1) for row_n in x_bn])
    is_one_of_its_own = bool((same_bb.sum(0) == 1).all() and (same_bb.sum(1) == 1).all())
    return same_bb.int().argmax(1).tolist() if is_one_of_its_own and bool((_distinct(x_bn) > 2).all()) else None


def _order_by_likeness(x_bk: torch.Tensor, y_bk: torch.Tensor) -> list[int] | None:
    """Which row of ``y`` each row of ``x`` is much more like than any other; None where that is not known, as after
    some augmentations."""
    if len(x_bk) != len(y_bk) or not (torch.isfinite(x_bk).all() and torch.isfinite(y_bk).all()):
        return None
    x0_bk, y0_bk = _without_mean(x_bk), _without_mean(y_bk)
    squares = (x0_bk**2).sum(1, keepdim=True) * (y0_bk**2).sum(1)
    like_bb = (x0_bk @ y0_bk.T) ** 2 / squares.clamp(min=_TINY)
    best = like_bb.topk(2, 1)
    order = best.indices[:, 0]
    is_known = bool((best.values[:, 0] > 0.5).all() and (best.values[:, 1] < best.values[:, 0] / 2).all())
    return order.tolist() if is_known and len(order.unique()) == len(order) else None


def _is_mixed(x_bk: torch.Tensor, y_bk: torch.Tensor) -> bool:
    """Whether rows of ``x`` hold parts of other rows of ``y`` than their own."""
    if not (torch.isfinite(x_bk).all() and torch.isfinite(y_bk).all()):
        return False
    if _is_centred(x_bk) and not _is_centred(y_bk):
        return True
    x_ik, x0_ik, y0_bk = x_bk[:_ROWS], _without_mean(x_bk[:_ROWS]), _without_mean(y_bk)
    own_i = ((x0_ik @ y0_bk.T) ** 2 / (y0_bk**2).sum(1).clamp(min=_TINY)).argmax(1)  # rows may be in another order
    return _are_sums(x0_ik, y0_bk, own_i, _distinct(x_ik) > 2) or _are_parts(x_ik, y_bk, own_i)


def _without_mean(x_bk: torch.Tensor) -> torch.Tensor:
    return x_bk - x_bk.mean(1, keepdim=True)


def _is_centred(x_bk: torch.Tensor) -> bool:
    """Whether the mean over the batch is nothing beside the numbers; that of independent rows is 1/√B of them."""
    return bool(x_bk.mean(0).norm() <= 1e-3 * x_bk.norm() / len(x_bk))


def _are_sums(x_ik: torch.Tensor, y_bk: torch.Tensor, own_i: torch.Tensor, many_i: torch.Tensor) -> bool:
    """Whether what is left of a row of ``x`` without its own row of ``y`` is a multiple of what is left of another row
    of ``y``.

    Or nothing is left of two rows of ``x`` that have one row of ``y`` for their own. Rows where not ``many`` numbers
    differ, as zeros and ones, have much in common by chance.
    """
    squares_i, squares_b = (x_ik**2).sum(1), (y_bk**2).sum(1)
    own_ik, own_squares_i = y_bk[own_i], squares_b[own_i].clamp(min=_TINY)
    left_ik = x_ik - (x_ik * own_ik).sum(1, keepdim=True) / own_squares_i[:, None] * own_ik
    left_i = (left_ik**2).sum(1)
    others_ib = squares_b - (own_ik @ y_bk.T) ** 2 / own_squares_i[:, None]
    is_other_ib = others_ib > 1e-4 * squares_b
    pure = own_i[many_i & (left_i <= 1e-5 * squares_i) & (is_other_ib.sum(1) == len(y_bk) - 1)]
    if len(pure.unique()) < len(pure):
        return True
    spread_i = left_ik.abs().sum(1) ** 2 / left_i.clamp(min=_TINY)  # in how many numbers, if all are of one size
    tells_i = many_i & (left_i > 1e-4 * squares_i) & (spread_i >= _FEWEST)
    is_sum_ib = is_other_ib & ((left_ik @ y_bk.T) ** 2 >= 0.999 * left_i[:, None] * others_ib)
    return bool((tells_i[:, None] & is_sum_ib).any())


def _are_parts(x_ik: torch.Tensor, y_bk: torch.Tensor, own_i: torch.Tensor) -> bool:
    """Whether numbers of a row of ``x`` were replaced by those of another row of ``y``, that are nowhere else in their
    row and column of it."""
    changed_ik = x_ik != y_bk[own_i]
    taken_ibk = (x_ik[:, None] == y_bk) & changed_ik[:, None]
    if not taken_ibk.any():
        return False
    taken_ib = (taken_ibk & _is_unique(y_bk, 0) & _is_unique(y_bk, 1)).sum(2)
    return bool((taken_ib.max(1).values >= (changed_ik.sum(1) // 16).clamp(min=_FEWEST)).any())


def _is_unique(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Which numbers are there only once along ``dim``."""
    ordered, order = x.movedim(dim, 0).sort(0)
    same = ordered[1:] == ordered[:-1]
    none = torch.zeros_like(same[:1])
    repeated = torch.cat([same, none]) | torch.cat([none, same])
    return torch.empty_like(repeated).scatter_(0, order, ~repeated).movedim(0, dim)


def _distinct(x_ik: torch.Tensor) -> torch.Tensor:
    """How many numbers of each row are different."""
    ordered = x_ik.sort(1).values
    return 1 + (ordered[:, 1:] != ordered[:, :-1]).sum(1)
