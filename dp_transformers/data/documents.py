"""Cuts documents into rows, each of one document; and says who owns each row, and which rows of an owner are kept."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

logger = logging.getLogger(__name__)

Columns = Mapping[str, Sequence[Any]]


def keep_documents_apart(
    prepare: Callable[[Columns], Columns], max_rows: int | None = 1, *, keep: Sequence[str] = ()
) -> Callable[..., dict]:
    """Return a function for ``datasets.map(batched=True)`` that calls ``prepare`` with one document at a time, keeps
    the first ``max_rows`` rows that it makes of each, and says on each row whose it is.

    A function that maps a batch of documents may make rows which hold pieces of several, or many rows of one. With
    this one around it, no row holds pieces of two documents. Either a document is the privacy unit, or its owner is
    (``privacy_unit_column``), which bounds all of its rows together; or of one document there are ``max_rows`` rows at
    most: that is the number for ``max_examples_per_person``, if a person has one document.

    Args:
        prepare: Makes columns of rows of columns of documents, as functions for ``map(batched=True)`` do.
        max_rows: Rows that are kept of a document; None for all.
        keep: Columns that each row takes over from its document, such as its owner, whatever ``prepare`` returns. With
            ``map(with_indices=True)`` each row also gets the index of its document, in the column "document".

    Raises:
        KeyError: the documents have no column of ``keep``.

    Example::

        >>> from dp_transformers import keep_documents_apart
        >>> def pairs(batch):
        ...     words = [word for text in batch["text"] for word in text.split()]
        ...     return {"row": [" ".join(words[i : i + 2]) for i in range(0, len(words), 2)]}
        >>> batch = {"text": ["a b c", "d e f g h"], "author": ["ann", "bob"]}
        >>> pairs(batch)["row"]  # one row holds pieces of both texts
        ['a b', 'c d', 'e f', 'g h']
        >>> keep_documents_apart(pairs, max_rows=2)(batch)["row"]
        ['a b', 'c', 'd e', 'f g']
        >>> keep_documents_apart(pairs, max_rows=None, keep=["author"])(batch)
        {'row': ['a b', 'c', 'd e', 'f g', 'h'], 'author': ['ann', 'ann', 'bob', 'bob', 'bob']}
    """
    if max_rows is not None:
        _require_positive("max_rows", max_rows)

    def prepare_each(documents: Columns, indices: Sequence[int] | None = None) -> dict[str, list]:
        made: dict[str, list] = {}
        of_document = {name: documents[name] for name in keep} | ({} if indices is None else {"document": indices})
        for i in range(len(next(iter(documents.values()), ()))):
            rows = {**prepare({name: [values[i]] for name, values in documents.items()})}
            number = len(next(iter(rows.values()), ()))
            rows |= {name: [values[i]] * number for name, values in of_document.items()}
            for name, values in rows.items():
                made.setdefault(name, []).extend(values[:max_rows])
        return made

    return prepare_each


def padded_blocks(block_size: int) -> Callable[[Columns], dict]:
    """Return a function that cuts tokenized documents into rows of ``block_size`` tokens, and pads the last row of
    each document on the right.

    It takes the place of ``group_texts`` in scripts that train causal language models, whose blocks hold pieces of
    several documents. Padding has ``attention_mask`` 0 and the label -100, so that it counts for nothing, and no
    special token is needed for it. Use it within :func:`keep_documents_apart`, which also bounds how many rows a
    document has.

    Example::

        >>> from dp_transformers import keep_documents_apart, padded_blocks
        >>> prepare = keep_documents_apart(padded_blocks(3))
        >>> rows = prepare({"input_ids": [[5, 6, 7, 8], [9]], "attention_mask": [[1, 1, 1, 1], [1]]})
        >>> rows["input_ids"], rows["labels"]
        ([[5, 6, 7], [9, 0, 0]], [[5, 6, 7], [9, -100, -100]])
    """
    _require_positive("block_size", block_size)

    def cut(documents: Columns) -> dict[str, list]:
        columns = {**documents, "labels": documents["input_ids"]}
        return {name: _blocks(values, block_size, -100 if name == "labels" else 0) for name, values in columns.items()}

    return cut


def _blocks(documents: Sequence[Sequence[int]], size: int, padding: int) -> list[list[int]]:
    blocks = [list(tokens[i : i + size]) for tokens in documents for i in range(0, len(tokens), size)]
    return [block + [padding] * (size - len(block)) for block in blocks]


def first_rows_of_each(owners: Iterable[Any], max_rows: int) -> list[int]:
    """Return the indices of the first ``max_rows`` rows of each owner, for ``dataset.select``.

    Which rows of a person are kept depends on that person's rows alone, so ``max_examples_per_person=max_rows`` is
    true of the rows that are left. Choose the number without looking at these data.

    A row with several owners is kept if each of them has fewer than ``max_rows`` kept rows (the greedy bound of
    arXiv:2503.03622). Then a person also has a say in which rows of others are kept, so that ε holds where it is
    public which rows belong to whom: what a person's rows hold is hidden, not whose they are.

    Args:
        owners: As in :func:`owners_of_rows`.

    Raises:
        ValueError: as :func:`owners_of_rows`.

    Example::

        >>> from dp_transformers import first_rows_of_each
        >>> first_rows_of_each(["ann", "bob", "ann", "ann", "bob"], max_rows=2)
        [0, 1, 2, 4]
        >>> first_rows_of_each([["ann", "bob"], ["bob", "cat"], ["cat"]], max_rows=1)  # bob's one row is the first
        [0, 2]
    """
    _require_positive("max_rows", max_rows)
    kept_of: Counter = Counter()
    kept = []
    for i, owner in enumerate(owners_of_rows(owners)):
        if all(kept_of[each] < max_rows for each in _each(owner)):
            kept_of.update(_each(owner))
            kept.append(i)
    return kept


def owners_of_rows(column: Iterable[Any]) -> list[Any]:
    """Return the owner of each row as a value that equals the owner of each of its other rows, with the same hash;
    of a row with several owners, a frozenset of them.

    An owner that has more than half of all rows is warned of: often it is a default value.

    Args:
        column: The owner of each row, by a name or a number; a tensor or an array counts as what it holds. A list,
            tuple or set holds several owners of one row; an owner that is known by two columns is one string.

    Raises:
        ValueError: an owner is missing (None, nan, an empty text or list), has no equal but itself, or is of another
            type than the rest, as 7 and "7" are.
    """
    owners = [_plain(owner, row) for row, owner in enumerate(column)]
    first_of: dict[type, int] = {}
    for row, of_row in enumerate(owners):
        for owner in _each(of_row):
            first_of.setdefault(type(owner), row)
    if len(first_of) > 1:
        (one, i), (other, j), *_ = first_of.items()
        raise ValueError(
            f"row {i} has an owner of type {one.__name__}, and row {j} one of type {other.__name__}: a person who is "
            "once 7 and once '7' or 7.0 would count as two, each with a bound of its own. Turn all owners into one "
            "type, so that each person has one name."
        )
    rows_of = Counter(owner for of_row in owners for owner in _each(of_row))
    if (most := max(rows_of.values(), default=0)) > len(owners) / 2:
        logger.warning(
            "One owner has %d of %d rows. If it is a default value (0, 'unknown'), give these rows their owners, or "
            "leave them out; if it is one person, little will be learned, since much of the data is bounded as one.",
            most,
            len(owners),
        )
    return owners


def _plain(owner: Any, row: int) -> Any:
    """Return the owner as a value that equals the owner of each of its other rows; several as a frozenset of them."""
    for to_plain in ("tolist", "as_py"):  # a tensor is equal to itself alone
        owner = getattr(owner, to_plain)() if hasattr(owner, to_plain) else owner
    if isinstance(owner, (list, tuple, set, frozenset)):
        several = frozenset(each for part in owner for each in _each(_plain(part, row)))
        if several:
            return several if len(several) > 1 else next(iter(several))
        owner = None
    is_missing = type(owner).__name__ in ("NAType", "NaTType") or owner in (None, "", b"") or owner != owner
    if is_missing or type(owner).__hash__ in (None, object.__hash__):
        raise ValueError(
            f"row {row} has the owner {owner!r}, which is none, or does not equal the owner of its other rows. Give "
            "each owner a name or a number, and leave out rows without one (or give each a name of its own)."
        )
    return owner


def _each(owner: Any) -> Collection[Any]:
    """Return all owners of a row."""
    return owner if isinstance(owner, frozenset) else (owner,)


def _require_positive(name: str, value: int) -> None:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an int of at least 1, got {value!r}.")
