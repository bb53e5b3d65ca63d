"""Ed25519 signatures of certificates."""

import json
import stat

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519
from recorded import record

from dp_transformers.reports import certificate
from dp_transformers.reports.certificate import CERTIFICATE_NAME
from dp_transformers.reports.signatures import SIGNATURE_NAME, SignatureError, new_key, sign, signer


@pytest.fixture
def key(tmp_path):
    new_key(tmp_path / "key.pem")
    return tmp_path / "key.pem"


def test_sign_and_verify(tmp_path, key):
    folder = record(tmp_path / "run")
    assert signer(folder) is None
    public = sign(folder, key)
    assert signer(folder) == public and stat.S_IMODE(key.stat().st_mode) == 0o600
    said = json.loads((tmp_path / "run" / SIGNATURE_NAME).read_text())
    content = (tmp_path / "run" / CERTIFICATE_NAME).read_bytes()
    ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)).verify(bytes.fromhex(said["signature"]), content)


def test_a_command_that_is_repeated_and_trains_nothing_leaves_the_signature_valid(tmp_path, key, monkeypatch):
    folder = record(tmp_path / "run")
    certificate.write(folder, unfinished={"a1": 1})
    public = sign(folder, key)
    before = (tmp_path / "run" / CERTIFICATE_NAME).read_bytes()
    monkeypatch.setattr(certificate, "_now", lambda: "2030-01-01T00:00:00+00:00")
    certificate.write(folder)
    assert signer(folder) == public and (tmp_path / "run" / CERTIFICATE_NAME).read_bytes() == before
    record(folder, first=20, steps=1)
    with pytest.raises(SignatureError, match="training went on"):
        signer(folder)
    assert certificate.read(folder)["written"].startswith("2030")


@pytest.mark.parametrize("name", [CERTIFICATE_NAME, SIGNATURE_NAME])
def test_what_was_changed_after_it_was_signed(tmp_path, key, name):
    folder = record(tmp_path / "run")
    sign(folder, key)
    path = tmp_path / "run" / name
    path.write_text(
        path.read_text().replace('"public_key": "', '"public_key": "0').replace('"steps": 20', '"steps": 19')
    )
    with pytest.raises(SignatureError, match="is no signature"):
        signer(folder)


def test_another_signer_is_another(tmp_path, key):
    folder = record(tmp_path / "run")
    first = sign(folder, key)
    new_key(tmp_path / "other.pem")
    assert sign(folder, tmp_path / "other.pem") == signer(folder) != first


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"public_key": "zz", "signature": ""}'])
def test_what_is_no_signature(tmp_path, text):
    folder = record(tmp_path / "run")
    (tmp_path / "run" / SIGNATURE_NAME).write_text(text)
    with pytest.raises(SignatureError, match="is no signature"):
        signer(folder)
