"""Signatures of certificates (Ed25519, RFC 8032). A certificate holds the SHA-256 of its ledger, so both are signed.

The chain of a ledger reveals a changed line to anyone with an earlier digest; a signature reveals it to anyone with
the signer's public key."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .certificate import CERTIFICATE_NAME

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

SIGNATURE_NAME = f"{CERTIFICATE_NAME}.sig"


class SignatureError(ValueError):
    """Raised for a signature that is missing, or does not match the certificate."""


def new_key(path: str | os.PathLike) -> str:
    """Write a new private key into a file that only its owner can read (PEM), and return its public key (hex)."""
    ed25519, serialization = _cryptography()
    key = ed25519.Ed25519PrivateKey.generate()
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    try:
        if not Path(path).parent.exists():
            Path(path).parent.mkdir(mode=0o700, parents=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(pem)
    except (NotADirectoryError, PermissionError) as error:
        raise SignatureError(
            f"the key '{path}' cannot be written ({error.strerror}): name a new file in a folder of yours."
        ) from error
    return _public(key)


def sign(folder: str | os.PathLike, key_file: str | os.PathLike) -> str:
    """Sign the certificate in a folder (``privacy.json.sig``), and return the public key (hex).

    Raises:
        SignatureError: the file holds no Ed25519 key.
    """
    ed25519, serialization = _cryptography()
    try:
        key = serialization.load_pem_private_key(Path(key_file).read_bytes(), password=None)
    except (ValueError, TypeError) as error:
        raise SignatureError(
            f"'{key_file}' holds no private key without a password ({error}): make one with new_key()."
        ) from error
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise SignatureError(f"'{key_file}' holds a {type(key).__name__}: make an Ed25519 key with new_key().")
    content = (Path(folder) / CERTIFICATE_NAME).read_bytes()
    signed = {"algorithm": "Ed25519", "public_key": _public(key), "signature": key.sign(content).hex()}
    (Path(folder) / SIGNATURE_NAME).write_text(json.dumps(signed, indent=2) + "\n")
    return signed["public_key"]


def signer(folder: str | os.PathLike) -> str | None:
    """Return the public key (hex) with which the certificate in a folder is signed; None if it is not signed.

    Raises:
        SignatureError: the signature does not match the certificate.
    """
    path = Path(folder) / SIGNATURE_NAME
    if not path.exists():
        return None
    certificate = Path(folder) / CERTIFICATE_NAME
    if not certificate.exists():
        raise SignatureError(
            f"'{path}' exists, but '{certificate}', which it signs, does not. Put it back, or delete the signature."
        )
    ed25519, _ = _cryptography()
    from cryptography.exceptions import InvalidSignature

    try:
        signed = json.loads(path.read_text())
        key = ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(signed["public_key"]))
        key.verify(bytes.fromhex(signed["signature"]), certificate.read_bytes())
    except InvalidSignature:
        raise SignatureError(
            f"'{path}' is no signature of this {CERTIFICATE_NAME}: the certificate was changed after it was signed, "
            "or training went on. Sign it again if you trust it."
        ) from None
    except (KeyError, TypeError, ValueError) as error:
        raise SignatureError(
            f"'{path}' is no signature ({type(error).__name__}: {error}): it was changed. Delete it, and sign the "
            "certificate again if you trust it."
        ) from error
    return signed["public_key"]


def _public(key: Ed25519PrivateKey) -> str:
    return key.public_key().public_bytes_raw().hex()


def _cryptography() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise SignatureError("signatures need the package cryptography: pip install 'dp-finetune[secure]'") from None
    return ed25519, serialization
