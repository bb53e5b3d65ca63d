"""The keystream of ChaCha20, and a NumPy generator that draws from it. Free of torch."""

from __future__ import annotations

import ctypes
import hashlib
import operator
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, count, repeat

import numpy as np

_WORDS = struct.Struct("<512Q")  # 64-bit numbers made at once
_STREAM = 2**37  # bytes taken from one key, half of its keystream


def chacha20(entropy: Sequence[int]) -> Callable[[bytes], bytes]:
    """Return a function that encrypts zero bytes to the keystream, under 256-bit keys derived from ``entropy``.

    Raises:
        ImportError: the ``cryptography`` package is missing.
    """
    streams = _streams(entropy)
    encrypted, left = next(streams), _STREAM

    def keystream(zeros: bytes) -> bytes:
        nonlocal encrypted, left
        if left < len(zeros):
            encrypted, left = next(streams), _STREAM
        left -= len(zeros)
        return encrypted(zeros)

    return keystream


def _streams(entropy: Sequence[int]) -> Iterator[Callable[[bytes], bytes]]:
    """Yield such a function for one key after the other. Each key has one stream of limited length."""
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
    except ImportError as error:
        raise ImportError(
            "secure_rng=True needs the 'cryptography' package: install it (pip install cryptography)."
        ) from error
    for number in count():
        name = f"{list(entropy)}, key {number}" if number else repr(list(entropy))
        key = hashlib.sha256(name.encode()).digest()
        yield Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor().update


def secure_generator(entropy: Sequence[int]) -> np.random.Generator:
    """Return a NumPy generator, with all its distributions, that draws from the keystream of ChaCha20.

    Raises:
        ImportError: the ``cryptography`` package is missing.
    """
    return np.random.Generator(_KeystreamBits(_streams(entropy)))  # pyrefly: ignore[bad-argument-type]


class _Functions(ctypes.Structure):
    """NumPy's ``bitgen_t``, the source of random bits of its distributions."""

    _fields_ = [
        ("state", ctypes.c_void_p),
        ("next_uint64", ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p)),
        ("next_uint32", ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_void_p)),
        ("next_double", ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_void_p)),
        ("next_raw", ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p)),
    ]


class _KeystreamBits:
    """A bit generator for ``np.random.Generator``.

    NumPy calls the functions from C, which would lose an exception and use 0 instead. So they run only compiled code,
    in which Python raises no KeyboardInterrupt, except when a key is used up.
    """

    def __init__(self, streams: Iterator[Callable[[bytes], bytes]]):
        zeros, each = bytes(_WORDS.size), _STREAM // _WORDS.size
        pieces = chain.from_iterable(map(encrypted, repeat(zeros, each)) for encrypted in streams)
        words = chain.from_iterable(map(_WORDS.unpack, pieces))
        doubles = map((2.0**-53).__mul__, map(operator.rshift, words, repeat(11)))
        word, double = partial(next, words), partial(next, doubles)
        kinds = [field[1] for field in _Functions._fields_[1:]]
        self._functions = _Functions(
            None, *(kind(function) for kind, function in zip(kinds, (word, word, double, word), strict=True))
        )
        self.lock, self.capsule = threading.Lock(), _capsule(ctypes.addressof(self._functions), b"BitGenerator", None)


_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
