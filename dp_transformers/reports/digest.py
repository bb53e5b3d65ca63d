"""A keyed digest of training data. With the key, it shows if two trainings used the same rows; without, nothing.

A plain hash would answer the question that privacy hides: anyone with all rows but one could try candidates for the
last row. HMAC-SHA256 (RFC 2104) needs a key for this. The key is made once for each owner, in a file that only the
owner can read, and is written nowhere else.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

KEY_NAME = "data_digest.key"
_KEY_BYTES = 32
_BATCH = 1000  # rows that are read at once
_QUICK = 2**22  # characters of JSON that are read in less than a second


class UndefinedDigestError(TypeError):
    """Raised if a row holds an object for which no digest is defined."""


def key_path() -> Path:
    """Return the path of the owner's key, ``dp_transformers/data_digest.key`` in ``~/.config`` or XDG_CONFIG_HOME."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "dp_transformers" / KEY_NAME


def owner_key() -> bytes:
    """Read the owner's key, or make it.

    Raises:
        ValueError: users other than the owner can read the file, or it holds no key.
        OSError: it can be neither read nor written.
    """
    path = key_path()
    if not path.exists():
        _make(path)
    if os.name != "nt" and path.stat().st_mode & 0o077:
        raise ValueError(f"others than its owner can read the key '{path}': chmod 600 '{path}'")
    try:
        key = bytes.fromhex(path.read_text())
    except ValueError:
        key = b""
    if len(key) != _KEY_BYTES:
        raise ValueError(f"'{path}' holds no key: restore it from a backup, or delete it to have another one made")
    return key


def _make(path: Path) -> None:
    """Write a new key atomically, unless another process was faster."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(_KEY_BYTES) + "\n")
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    finally:
        temporary.unlink()


def name_of(key: bytes) -> str:
    """Return a name of a key that does not reveal it. Only digests with the same key can be compared."""
    return hmac.digest(key, b"name of this key", "sha256")[:8].hex()


def row_digests(rows: Iterable[Any], key: bytes) -> list[bytes]:
    """Return the HMAC-SHA256 of each row's JSON.

    Raises:
        UndefinedDigestError: a row holds an object other than JSON values, arrays, bytes and dates.
    """
    return [hmac.digest(key, _content(row), "sha256") for row in rows]


def digest(each: Iterable[bytes], key: bytes) -> str:
    """Return the digest of rows in any order: HMAC-SHA256 over their sorted digests."""
    return "hmac-sha256:" + hmac.new(key, b"".join(sorted(each)), hashlib.sha256).hexdigest()


def _content(row: Any) -> bytes:
    return json.dumps(row, sort_keys=True, separators=(",", ":"), default=_plain).encode()


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # arrays and tensors
        return value.tolist()
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "isoformat"):
        return value.isoformat()
    raise UndefinedDigestError(f"a row holds a {type(value).__name__}, of which no digest is defined")


def rows_of(dataset: Any) -> Iterator[Any]:
    """Return the stored rows of a list, a ``TensorDataset``, or a ``datasets.Dataset`` (without its transforms).

    Raises:
        TypeError: it is another kind of data set, which may compute its rows at random.
    """
    if isinstance(dataset, (list, tuple)):
        return iter(dataset)
    if hasattr(dataset, "with_format") and hasattr(dataset, "iter"):
        stored = dataset.with_format("arrow")
        return (row for table in stored.iter(_BATCH) for row in table.to_pylist())
    if hasattr(dataset, "tensors"):
        return (tuple(x.tolist() for x in row) for row in zip(*dataset.tensors, strict=True))
    raise TypeError(
        f"the data set is a {type(dataset).__name__}, and its rows may differ each time that they are read; lists, "
        "TensorDataset and datasets.Dataset have a digest"
    )


def describe_data(
    dataset: Any, public_folder: str | os.PathLike, say: Callable[[Counter[bytes]], None], *, wanted: bool = True
) -> dict[str, Any]:
    """Return the number of rows of the training data, and their digest or the reason why there is none.

    Args:
        public_folder: A folder that is handed over or pushed. A key inside it is not used.
        say: Is called with how often each row comes, which is not handed over, since it tells of the rows.
        wanted: Compute the digest. It reads every row once, some 20,000 in a second.
    """
    facts: dict[str, Any] = {"rows": len(dataset), "digest": None, "key": None}
    try:
        if not wanted:
            raise ValueError("none was wanted (data_digest=False)")
        if key_path().resolve().is_relative_to(Path(public_folder).resolve()):
            raise ValueError(f"the key would lie in '{public_folder}', which is handed over: set XDG_CONFIG_HOME")
        key, rows = owner_key(), rows_of(dataset)
    except (OSError, TypeError, ValueError) as error:
        return {**facts, "no_digest_because": str(error)}
    try:
        each = row_digests(rows, key)
    except UndefinedDigestError as error:
        return {**facts, "no_digest_because": str(error)}
    except Exception as error:  # its text may quote the row, and no row must stop a training
        return {
            **facts,
            "no_digest_because": f"a row cannot be read, or not be written as JSON ({type(error).__name__})",
        }
    say(Counter(each))
    return {**facts, "digest": digest(each, key), "key": name_of(key)}


def count_rows(dataset: Any) -> Counter[bytes]:
    """Count how often each row comes, for a training without a ledger. Nothing is counted of data sets that take a
    second or longer, nor of rows of which no digest is defined."""
    try:
        size = len(dataset) * max((len(_content(row)) for row in islice(rows_of(dataset), 1)), default=0)
        return Counter(row_digests(rows_of(dataset), secrets.token_bytes(_KEY_BYTES)) if size <= _QUICK else ())
    except Exception:  # no row must stop a training
        return Counter()
