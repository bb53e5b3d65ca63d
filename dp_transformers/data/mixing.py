"""Rows that hold data of several examples (MixUp, CutMix, normalisation over the batch): clipping by row bounds none
of them."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from ..clipping.checks.shared_numbers import Call, Drawn, called_alike, watched_draws
from ..clipping.checks.spread_numbers import spread_numbers
from ..clipping.ragged import bag_columns, is_ragged, unpacked_sequence, with_rows_for_bags
from ..mechanism.values import equal_or_nan
from ..runtime.randomness import generators_apart
from .rows import Collate, copied, leaves, same_numbers, size_of


def refuse_mixed(
    collate: Collate, examples: Sequence[Any], reseed: Callable[[str], None], *, who: str = "collator"
) -> bool:
    """Raise ValueError unless each row that ``collate`` makes is one of its own example and of secret random numbers
    alone.

    * Made again from the same secret, a batch is the same: otherwise random numbers come from where they may be known.
    * With one example replaced, all other rows are the same (MixUp, CutMix, normalisation over the batch, rows put in
      another order than labels).
    * Where numbers were drawn, no row changes with one example and with another one (sequences packed into one row).
    * Where no numbers were drawn from the secret, the same holds with one example left out: rows do not depend on
      their position either, as they do by numbers from a known seed.
    * Copies of one example are given the same row, wherever they are in a batch and however many there are, where all
      rows are given the same random numbers.

    ``collate`` gives a batch, or a list with a row for each example. ``reseed`` seeds the random generators for a
    purpose.

    Returns:
        Whether random numbers are drawn.
    """

    whole = sorted(examples, key=size_of)
    draws = _draws(collate, whole, reseed)
    draws |= _refuse_mixed(collate, whole if len(whole) > 2 else [*whole, whole[-1]], reseed, who, draws=draws)
    draws |= _refuse_mixed(collate, [whole[0], whole[-1], whole[-1]], reseed, who, draws=draws)  # by their length
    _refuse_places(collate, whole[-1], reseed, who)
    return draws


def _refuse_places(collate: Collate, example: Any, reseed: Callable[[str], None], who: str) -> None:
    """Raise ValueError if copies of one example are given other rows by their place in the batch, or by how many there
    are. Random numbers of torch are the same for all of them; with others that is not known, nor where ``collate``
    raises for so many."""
    sizes, batches = (_PLACES, _PLACES - 1), []
    for size, purpose in [*((size, "mixing, places") for size in sizes), (_PLACES, "mixing, places, other numbers")]:
        reseed(purpose)
        try:
            with spread_numbers(sizes, reordered=True) as draws_no_others:
                batches.append(_tensors(collate([copied(example) for _ in range(size)])))
                if not draws_no_others():
                    return
        except Exception:
            return
    if not _agree(batches[0], batches.pop()):  # a generator of its own draws
        return
    bags = bag_columns([*zip(batches, sizes, strict=True)])
    batch, smaller = (with_rows_for_bags(x, n, bags) for x, n in zip(batches, sizes, strict=True))
    for name, dim in _dims_of_rows(batch, smaller, _PLACES).items():
        rows, of_smaller = batch[name].movedim(dim, 0), smaller[name].movedim(dim, 0)
        others = [rows] if rows.shape[1:] != of_smaller.shape[1:] else [rows, of_smaller]
        if not all(_is_near(x, rows[0].expand_as(x)) for x in others):
            raise ValueError(
                f"'{name}' of a row that the {who} makes depends on its place in the batch, or on how many rows there "
                "are: every second row or the first are treated otherwise, numbers go by place (a ramp, a table), "
                "or random numbers of one row are used for another one. An example that is left out moves those "
                "behind it, so that clipping rows would not bound what one example can change. Treat all rows alike, "
                "and draw random numbers for each row by itself."
            )


def _is_near(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether they are the same, floating-point numbers but for rounding: products of matrices round by place."""
    if not x.is_floating_point():
        return same_numbers(x, y)
    x, y = x.double(), y.double()
    largest = x[x.isfinite()].abs().max() if bool(x.isfinite().any()) else torch.zeros(())
    return bool((equal_or_nan(x, y) | ((x - y).abs() <= 1e-5 * largest)).all())


def _draws(collate: Collate, examples: list[Any], reseed: Callable[[str], None]) -> bool:
    """Whether ``collate`` draws from a global generator of Python, NumPy or torch that it does not seed itself."""
    states = []
    for purpose in ("whether numbers are drawn", "whether they are drawn anew"):
        reseed(purpose)
        before = generators_apart()
        try:
            collate([copied(row) for row in examples])
        except Exception:  # of which the comparison of batches will tell
            return False
        states.append((before, generators_apart()))
    (before, after), (before_again, after_again) = states
    return any(
        x != y and z != w and y != w for x, y, z, w in zip(before, after, before_again, after_again, strict=True)
    )


def _refuse_mixed(collate: Collate, whole: list[Any], reseed: Callable[[str], None], who: str, *, draws: bool) -> bool:
    """Return whether random numbers change the batch, or ``draws``: some may have changed nothing by chance."""
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
    with_other_numbers = made(whole, "mixing, with other numbers")
    drew = draws or not _agree(batch, with_other_numbers)
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
    edited = [(made(part), stay) for part, stay in edits]
    of_others = [part for part, _ in edited]
    if drew:
        same_size = [x for x in whole[1:] if size_of(x) == size_of(first)]
        made(whole)
        states, part = generators_apart(), made([(same_size or whole)[-1], *between, last])
        of_others.append(part)
        if same_size and generators_apart() == states:  # so that the numbers of later rows are the same ones
            edited.append((part, len(whole) - 1))
    not_drawn = {name for name, x in batch.items() if same_numbers(x, with_other_numbers.get(name, x))}
    for_all = _for_all_rows(batch, without_first, not_drawn - rows_in.keys() - _in_lists(batch, len(whole)))
    if changed := next((name for part in of_others for name in for_all if _is_another(name, batch, part)), None):
        raise ValueError(
            f"'{changed}', which the {who} gives for the whole batch and not for each row, is another one when an "
            "example of the batch is replaced (a mean, a scale, weights of classes, a number of tokens). All rows "
            "would be computed with it, and clipping rows would not bound what one example can change. Compute it "
            "before training, from what is public, or for each row by itself."
        )
    changed = next(
        (name for part, stay in edited for name in _with_other_rows(batch, part, rows_in, stay, drew)), None
    )
    if drew and changed is None:  # the shortest one last takes no number from those before it
        changed = next(_cut(made([*between, first]), made([*between, last]), rows_in, len(between)), None)
    if changed is not None:
        raise ValueError(
            f"the {who} mixes examples: '{changed}' of a row changes when another example of its batch is replaced "
            "(MixUp, CutMix, normalisation over the batch, rows cut to the shortest or put in another order than "
            "their labels). Such a row holds several people's data, and clipping rows would not bound what one "
            f"example can change. Remove the mixing from the {who}: augment each example by itself, pad rows to the "
            "longest instead of cutting them, and keep them in the order of their labels."
        )
    if not drew and (changed := next(_with_other_rows(batch, without_first, rows_in, len(whole) - 1, drew), None)):
        raise ValueError(
            f"'{changed}' of a row that the {who} makes depends on how many examples come before it, and not on the "
            "secret seeds of private training: its random numbers come from a seed that is set in it, or it mixes "
            "examples. Remove the seed, so that it draws from the global generators of torch, NumPy or Python."
        )
    return drew


def _refuse_shared_rows(
    batch: dict[str, torch.Tensor],
    whole: list[Any],
    made: Callable[[list[Any]], dict[str, torch.Tensor]],
    rows_in: dict[str, int],
    who: str,
) -> None:
    """Raise ValueError if one row of the batch, and no other, changes with one of its last examples, and with another
    one. Each is replaced by an example of its size, so that the numbers that are drawn for others are the same."""
    made(whole)
    rows, states = set[int](), generators_apart()
    for place in range(len(whole) - 1, max(0, len(whole) - 1 - _SHARING), -1):
        others = [x for x in whole if x is not whole[place]]
        same_size = [x for x in others if size_of(x) == size_of(whole[place])]
        edited = made([*whole[:place], (same_size or others)[0], *whole[place + 1 :]])
        takes_others = generators_apart() != states  # more or fewer numbers, so that those of later rows are others
        found = _rows_found(batch, edited, rows_in)
        changed = [] if found is None else (~found).nonzero().flatten().tolist()
        changed = [row for row in changed if not takes_others or row <= place]
        if len(changed) == 1 and changed[0] in rows:
            raise ValueError(
                f"the {who} makes one row of several examples (sequences packed into one), and clipping rows would "
                f"not bound what one example can change. Let the {who} make one row of every example."
            )
        rows |= {*changed} if len(changed) == 1 else set()


def drawn_for_all_rows(collate: Collate, example: Any, reseed: Callable[[str], None]) -> str | None:
    """Return the name of a column in which the rows of a batch share random numbers: copies of one example are always
    alike in a batch, and others in another one; or the generator of which some are drawn for all rows, and some for
    each. None if there is none."""

    def made(number: int) -> dict[str, torch.Tensor]:
        reseed(f"mixing, coin {number}")
        return _tensors(collate([copied(example) for _ in range(_COPIES)]))

    batches = [made(i) for i in range(_COINS)]
    for name in batches[0]:
        columns = [batch[name] for batch in batches if name in batch]
        rows = [row for x in columns if (row := _row_of_all(x, _COPIES)) is not None]
        if len(rows) == _COINS and any(not same_numbers(row, rows[0]) for row in rows[1:]):
            return name

    def draw(rows: slice, seed: int) -> Drawn:
        reseed(f"mixing, coin {seed}")
        with watched_draws() as drawn:
            collate([copied(example) for _ in range(_COPIES)[rows]])
            return drawn()

    def calls_of(drawn: Drawn) -> dict[Call, int]:
        return {**drawn.calls, **{("torch", "", shape): len(drew) for shape, drew in drawn.by_torch.items()}}

    called = called_alike(draw, _COPIES, None, calls_of)
    return called[0][0] if called else None


def refuse_drawn_for_all_rows(name: str) -> None:
    """Raise ValueError for such a column, of a draw that has several physical batches."""
    raise ValueError(
        f"the collator draws random numbers that all rows of a batch share ('{name}': a coin, a size or an angle for "
        "the whole batch). This draw has several physical batches, here or with other processes, and which rows share "
        "a number depends on the other examples, which clipping does not bound. Let the collator draw for each row, "
        "or let a physical batch of one process hold every draw (per_device_train_batch_size, "
        "max_physical_batch_size)."
    )


def _row_of_all(x: torch.Tensor, size: int) -> torch.Tensor | None:
    """The row that all of a column's rows are, in the first dimension that is as long as there are rows."""
    dim = next((d for d in range(min(2, x.dim())) if x.shape[d] == size), None)
    if dim is None:
        return None
    rows = x.movedim(dim, 0)
    return rows[0] if same_numbers(rows, rows[:1].expand_as(rows)) else None


_COPIES, _COINS = 4, 16  # of an example in a batch, and batches
_PLACES = 17  # copies of an example of which no place may matter; one less is looked at, too
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
        same = equal_or_nan(x, y).all(2)
        together = same if together is None else together & same
    return None if together is None else together.any(1)


def _as_long(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``x`` of shape (B, T), whose rows go on as they end until they are as long as those of ``y``."""
    return torch.cat([x, x[:, -1:].expand(-1, max(0, y.shape[1] - x.shape[1]))], 1)


def refuse_state(dataset: Any, before: Sequence[Any], after: Sequence[Any]) -> None:
    """Raise ValueError unless rows that ``dataset`` gave are the same rows that it gave later, with the same seeds."""
    for row, again in zip(before, after, strict=True):
        if changed := _other_columns(row, again):
            raise ValueError(
                f"the data set ({type(dataset).__name__}) gives another row when it is asked for it again, with the "
                f"same seeds and after other rows ('{changed[0]}'): it keeps state (a running mean, the largest "
                "number so far, the row before), so that a row holds several people's data, or it has random "
                "generators that private training does not find, whose numbers somebody may know. Let what it returns "
                "for an index depend on that index alone, and let it draw from the global generators of torch, NumPy "
                "or Python, or keep its generator as an attribute."
            )


def refuse_first_use(row: Any, as_first: Any, who: str, kept: Sequence[str]) -> None:
    """Raise ValueError unless a row, or a batch, is the same where nothing was made before it in its draw.

    Args:
        who: The data set or the collator, for the error.
        kept: Where it keeps what is another thing since the draw began.
    """
    if changed := _other_columns(row, as_first):
        raise ValueError(
            f"'{changed[0]}' of what the {who} makes of an example depends on which examples came before it: it keeps "
            f"what it met first ({', '.join(repr(name) for name in kept[:3])}), as numbers of classes or words that "
            "are given out on the fly (setdefault, len), a scaler that is fitted on the first rows, or a running "
            "maximum do. One person's row would change the rows of others, which clipping does not bound. Fill it "
            "before training, from what is public (a list of all classes, a vocabulary, constants), and keep nothing "
            "from row to row."
        )


def refuse_counted(row: Any, later: Any, who: str, kept: Sequence[str]) -> None:
    """Raise ValueError unless a row, or a batch, is the same where many more were made before it. The arguments are
    those of :func:`refuse_first_use`."""
    if changed := _other_columns(row, later):
        raise ValueError(
            f"'{changed[0]}' of what the {who} makes of an example depends on how many were made before it: it counts "
            f"them ({', '.join(repr(name) for name in kept[:3])}), as a warm-up of lengths or of a masking rate does. "
            "One row more would change when the rows of others become other ones, which clipping does not bound. "
            "Follow the number of steps instead (a callback that sets an attribute when a step begins, or set_epoch), "
            "which is public."
        )


def refuse_collected(names: Sequence[str]) -> None:
    """Raise ValueError for numbers that the data set or the collator collects while it makes rows."""
    if names:
        raise ValueError(
            f"the data set or the collator collects numbers or words while it makes rows "
            f"({', '.join(repr(name) for name in names[:3])}): running statistics, a scale, a vocabulary that grows. "
            "Later rows that are made with them would hold data of earlier ones, which clipping does not bound, even "
            "where nothing is made with them yet. Compute them before training, from what is public, and keep nothing "
            "from row to row; what is only shown to you (a time) may be kept in a whole number."
        )


def _other_columns(row: Any, again: Any) -> list[str]:
    """The columns in which two rows differ."""
    found, found_again = dict(leaves(row)), dict(leaves(again))
    return sorted(found.keys() ^ found_again.keys()) or [
        name for name, x in found.items() if not _is_same(x, found_again[name])
    ]


def _is_same(x: Any, y: Any) -> bool:
    """Whether two things in a row are the same, as far as they are numbers, tensors, words or images."""
    if isinstance(x, torch.Tensor):
        return isinstance(y, torch.Tensor) and (x.layout != torch.strided or x.is_nested or same_numbers(x, y))
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
                "examples. Let it keep the order (pack_padded_sequence with enforce_sorted=False sorts by itself), or "
                "set fill_physical_batches=False."
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
    same = equal_or_nan(x, y).movedim(dim, 0)
    return same.reshape(len(same), -1).all(1).cpu()


def _tensors(batch: Any) -> dict[str, torch.Tensor]:
    """The tensors, numbers and words of a batch, its lists of them, and those that objects in it hold. A list is one
    that default_collate makes of tuples, or has a row for each example."""
    columns = _as_batch(batch) if isinstance(batch, list) else {}
    batch = (
        {"batch": batch}
        if isinstance(batch, (list, torch.Tensor))
        else dict(batch)
        if isinstance(batch, Mapping)
        else batch
    )
    batch = tree_map(unpacked_sequence, batch, is_leaf=is_ragged)
    found = leaves(tree_map(_as_column, batch, is_leaf=lambda x: x is not batch and _is_plain(x)))
    return columns | {name: _as_tensor(x) for each in found for name, x in _opened(*each) if isinstance(x, _NUMBERS)}


_NUMBERS = (torch.Tensor, numbers.Complex, str, bytes)
_DEPTH = 3  # of objects in objects that are looked into


def _opened(name: str, x: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """It, or what an object of a class of the user's holds."""
    if isinstance(x, (*_NUMBERS, torch.nn.Module)) or not hasattr(x, "__dict__") or depth == _DEPTH:
        yield name, x
        return
    for part, y in leaves(x):
        yield from _opened(f"{name}/{part}", y, depth + 1)


def _as_tensor(x: Any) -> torch.Tensor:
    if isinstance(x, (str, bytes)):
        return torch.tensor(hash(x))
    if isinstance(x, torch.Tensor) and x.layout != torch.strided and not x.is_nested:
        return x.to_dense()
    is_long = isinstance(x, int) and abs(x) >= 2**63
    return torch.as_tensor(float(x) if is_long else x)


def _is_plain(x: Any) -> bool:
    """Whether it is a list of numbers and words, or of such lists."""
    return isinstance(x, (list, tuple)) and all(isinstance(y, (str, bytes, numbers.Real)) or _is_plain(y) for y in x)


def _as_column(x: Any) -> Any:
    """A list of numbers or words, or of such lists, as numbers that are the same where its entries are."""
    if not _is_plain(x):
        return x
    columns = [_as_column(y) if _is_plain(y) else float(y if isinstance(y, numbers.Real) else hash(y)) for y in x]
    entries = [torch.as_tensor(y, dtype=torch.float64) for y in columns]
    if any(y.shape != entries[0].shape for y in entries):  # not as long as each other
        entries = [torch.tensor(hash(repr(y)), dtype=torch.float64) for y in x]
    return torch.stack(entries) if entries else torch.zeros(0)


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
    for name in (whole.keys() & without_first.keys()) - _in_lists(whole, size):
        x, y = whole[name], without_first[name]
        found = next(
            (d for d in range(min(2, x.dim(), y.dim())) if (x.shape[d], y.shape[d]) == (size, size - 1)), None
        )
        if found is not None:
            dims[name] = found
    return dims


def _for_all_rows(
    whole: dict[str, torch.Tensor], without_first: dict[str, torch.Tensor], names: Collection[str]
) -> list[str]:
    """The columns among ``names`` that are no rows: their shapes do not depend on how many examples there are."""
    return [name for name in names if name in without_first and whole[name].shape == without_first[name].shape]


def _in_lists(batch: dict[str, torch.Tensor], size: int) -> set[str]:
    """The names of what stands in a list with an entry for each of ``size`` examples: each is a row by itself."""
    parts = {name: name.split("/") for name in batch}
    paths = {"/".join(each[: i + 1]) for each in parts.values() for i in range(len(each))}

    def is_in_a_list(each: list[str]) -> bool:
        lists = ("/".join(each[:i]) for i, part in enumerate(each) if part.isdigit())
        return any(f"{path}/{size - 1}".lstrip("/") in paths for path in lists)

    return {name for name, each in parts.items() if is_in_a_list(each)}


def _is_another(name: str, whole: dict[str, torch.Tensor], part: dict[str, torch.Tensor]) -> bool:
    """Whether what is given for a whole batch is something else for another one of as many examples. A number that is
    the length of some column in each, and what has another shape, tell of the longest row alone, as padding does."""
    x, y = whole[name], part.get(name)
    if y is None or x.shape != y.shape or same_numbers(x, y):
        return False
    are_lengths = not x.dim() and all(_is_length(each[name], each) for each in (whole, part))
    return not are_lengths


def _is_length(x: torch.Tensor, batch: dict[str, torch.Tensor]) -> bool:
    return not x.is_floating_point() and any(x.item() in column.shape[1:] for column in batch.values())


def _with_other_rows(
    whole: dict[str, torch.Tensor], part: dict[str, torch.Tensor], rows_in: dict[str, int], stay: int, drew: bool
) -> Iterator[str]:
    """Columns of ``whole`` of whose rows fewer than ``stay`` are rows of ``part``, made of some of its examples, in
    whatever order.

    Columns may be shorter in ``part``, where the longest example is not among its own; none is longer, unless rows are
    cut to the shortest, or random numbers made a row longer: the first rows, which ``stay``, are padded then.
    """
    together: torch.Tensor | None = None
    for name, dim in rows_in.items():
        if name not in part or part[name].dim() != whole[name].dim():
            continue
        x, y = whole[name].movedim(dim, 0), part[name].movedim(dim, 0)
        if x.shape[1:] == y.shape[1:]:
            x, y = x.reshape(len(x), 1, -1), y.reshape(1, len(y), -1)
            same: torch.Tensor = equal_or_nan(x, y).all(2)
            together = same if together is None else together & same  # the columns of a row stay together
            if int(together.any(1).sum()) < stay:
                yield name
                return
        elif any(map(operator.lt, x.shape[1:], y.shape[1:])) and not (drew and _are_padded(x[:stay], y[:stay])):
            yield name
            return


def _cut(
    short: dict[str, torch.Tensor], long: dict[str, torch.Tensor], rows_in: dict[str, int], stay: int
) -> Iterator[str]:
    """Columns of ``long`` whose first rows, which ``stay``, go on where those of ``short`` end."""
    for name, dim in rows_in.items():
        if name in short and name in long and short[name].dim() == long[name].dim():
            x, y = (each[name].movedim(dim, 0)[:stay] for each in (short, long))
            if any(same_numbers(rows, x) and _goes_on(beside) for rows, beside in _sides(x, y)):
                yield name


def _are_padded(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether rows ``y`` are rows ``x``, of shape (B, T), with padding before or after them."""
    return any(same_numbers(rows, x) and not _goes_on(beside) for rows, beside in _sides(x, y))


def _sides(x: torch.Tensor, y: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The first, and the last, positions of longer rows ``y``, as many as ``x`` has, of shape (B, T); and the rest."""
    if x.dim() == 2 and y.shape[1] > x.shape[1]:
        more = y.shape[1] - x.shape[1]
        yield from ((y[:, :-more], y[:, -more:]), (y[:, more:], y[:, :more]))


def _goes_on(rows_bt: torch.Tensor) -> bool:
    """Whether rows hold several numbers each, and not all the same, as positions do."""
    are_constant = same_numbers(rows_bt, rows_bt[:, :1].expand_as(rows_bt))
    return not are_constant and not same_numbers(rows_bt, rows_bt[:1].expand_as(rows_bt))


def _agree(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(x, b[name]) or same_numbers(x, b[name]) for name, x in a.items())
