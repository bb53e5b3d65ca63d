"""The keystream of ChaCha20, and a generator of NumPy whose random numbers come from it. Free of torch."""

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

_WORDS = struct.Struct("<512Q")  # numbers of 64 bits that are made at once


_STREAM = 2**37  # bytes that are taken of one key, half of those that it has


def chacha20(entropy: Sequence[int]) -> Callable[[bytes], bytes]:
    """Return what encrypts zeros, as many at a time as are given, to the keystream under keys of 256 bits that are
    made of ``entropy``.

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
    """The same for one key after the other, each of which has one stream alone, and an end."""
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
    """Return a generator with all distributions of NumPy's, computed from the keystream of ChaCha20.

    Raises:
        ImportError: the ``cryptography`` package is missing.
    """
    return np.random.Generator(_KeystreamBits(_streams(entropy)))  # pyrefly: ignore[bad-argument-type]


class _Functions(ctypes.Structure):
    """NumPy's ``bitgen_t``: where its distributions get their random bits."""

    _fields_ = [
        ("state", ctypes.c_void_p),
        ("next_uint64", ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p)),
        ("next_uint32", ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_void_p)),
        ("next_double", ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_void_p)),
        ("next_raw", ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p)),
    ]


class _KeystreamBits:
    """What ``np.random.Generator`` needs of a bit generator.

    NumPy calls the functions from C, where an exception would be lost and a 0 returned in its place. So they run
    nothing but compiled code, in which Python raises no KeyboardInterrupt, unless a key is used up.
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
