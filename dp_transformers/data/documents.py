"""Cuts documents into rows: each row is of one document, and a document has no more rows than a bound."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Columns = Mapping[str, Sequence[Any]]


def keep_documents_apart(prepare: Callable[[Columns], Columns], max_rows: int = 1) -> Callable[[Columns], dict]:
    """Return a function for ``datasets.map(batched=True)`` that calls ``prepare`` with one document at a time, and
    keeps the first ``max_rows`` rows that it makes of each.

    A function that maps a batch of documents may make rows which hold pieces of several, or many rows of one. With
    this one around it, no row holds pieces of two documents, and of one document there are ``max_rows`` rows at most:
    that is the number for ``max_examples_per_person``, if a person has one document.

    Example::

        >>> from dp_transformers import keep_documents_apart
        >>> def pairs(batch):
        ...     words = [word for text in batch["text"] for word in text.split()]
        ...     return {"row": [" ".join(words[i : i + 2]) for i in range(0, len(words), 2)]}
        >>> batch = {"text": ["a b c", "d e f g h"]}
        >>> pairs(batch)["row"]  # one row holds pieces of both texts
        ['a b', 'c d', 'e f', 'g h']
        >>> keep_documents_apart(pairs, max_rows=2)(batch)["row"]
        ['a b', 'c', 'd e', 'f g']
    """
    _require_positive("max_rows", max_rows)

    def prepare_each(documents: Columns) -> dict[str, list]:
        made: dict[str, list] = {}
        for i in range(len(next(iter(documents.values()), ()))):
            rows = prepare({name: [values[i]] for name, values in documents.items()})
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

    Args:
        owners: The owner of each row, by a name or a number; a tensor or an array counts as what it holds.

    Raises:
        ValueError: an owner is missing (None, nan), or does not equal the owner of its other rows.

    Example::

        >>> from dp_transformers import first_rows_of_each
        >>> first_rows_of_each(["ann", "bob", "ann", "ann", "bob"], max_rows=2)
        [0, 1, 2, 4]
    """
    _require_positive("max_rows", max_rows)
    seen: Counter = Counter()
    kept = []
    for i, owner in enumerate(owners):
        owner = _plain(owner, i)
        seen[owner] += 1
        if seen[owner] <= max_rows:
            kept.append(i)
    return kept


def _plain(owner: Any, row: int) -> Any:
    """Return the owner as a value that equals the owner of each of its other rows, with the same hash."""
    for to_plain in ("tolist", "as_py"):  # a tensor is equal to itself alone
        owner = getattr(owner, to_plain)() if hasattr(owner, to_plain) else owner
    if isinstance(owner, (list, tuple)):
        return tuple(_plain(part, row) for part in owner)
    is_missing = owner is None or type(owner).__name__ in ("NAType", "NaTType") or owner != owner
    if is_missing or type(owner).__hash__ in (None, object.__hash__):
        raise ValueError(
            f"row {row} has the owner {owner}, which is none, or does not equal the owner of its other rows. Give "
            "each owner a name or a number, and leave out rows without one (or give each a name of its own)."
        )
    return owner


def _require_positive(name: str, value: int) -> None:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an int of at least 1, got {value!r}.")
