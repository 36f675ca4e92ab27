"""Seals: what comes back is what was sealed under that label, or it is told that it is not."""

from __future__ import annotations

import ctypes
import os
import sys
from types import ModuleType

import pytest
from support.spilling import ENCRYPTIONS

from stormd.errors import SpillUnavailable
from stormd.memory.extents import SEAL_BYTES
from stormd.spill.sealing import Checksums, Encryption, Label, Sealer

LABEL = Label(session=1, entry=2, generation=3, nbytes=1000, number=0)


@pytest.fixture(params=ENCRYPTIONS)
def sealer(request: pytest.FixtureRequest) -> Sealer:
    return Encryption() if request.param == "on" else Checksums()


class _Bytes:
    def __init__(self, text: bytes) -> None:
        self.memory = ctypes.create_string_buffer(text, len(text))
        self.address = ctypes.addressof(self.memory)

    def __bytes__(self) -> bytes:
        return self.memory.raw


def _sealed(sealer: Sealer, text: bytes, label: Label = LABEL) -> _Bytes:
    source, out = _Bytes(text), _Bytes(bytes(len(text) + SEAL_BYTES))
    sealer.seal(label, source.address, len(text), out.address)
    return out


def _opened(sealer: Sealer, sealed: _Bytes, label: Label = LABEL) -> bytes | None:
    nbytes = len(bytes(sealed)) - SEAL_BYTES
    out = _Bytes(bytes(nbytes))
    return bytes(out) if sealer.open(label, sealed.address, nbytes, out.address) else None


def test_what_was_sealed_comes_back_by_its_label_alone(sealer: Sealer) -> None:
    for nbytes in (1, 16, 4097):
        text = os.urandom(nbytes)
        sealed = _sealed(sealer, text)
        assert _opened(sealer, sealed) == text
        for field in Label._fields:
            other = LABEL._replace(**{field: getattr(LABEL, field) + 1})
            assert _opened(sealer, sealed, other) is None, field


def test_any_changed_byte_is_found(sealer: Sealer) -> None:
    text = os.urandom(40)
    whole = bytes(_sealed(sealer, text))
    for index in range(len(whole)):
        changed = bytearray(whole)
        changed[index] ^= 1 << (index % 8)
        assert _opened(sealer, _Bytes(bytes(changed))) is None, index


def test_encrypted_bytes_are_another_time_others() -> None:
    pytest.importorskip("cryptography")
    text = bytes(64)
    sealer = Encryption()
    once = bytes(_sealed(sealer, text))
    again = bytes(_sealed(sealer, text, LABEL._replace(generation=4)))
    record = bytes(_sealed(sealer, text, LABEL._replace(number=1)))
    other = bytes(_sealed(Encryption(), text))
    assert len({once, again, record, other}) == 4
    assert bytes(16) not in once
    assert bytes(_sealed(Checksums(), text))[:64] == text


def test_without_the_package_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(SpillUnavailable, match=r"pip install cryptography.*--spill-encrypt=off"):
        Encryption()


def test_an_old_package_is_told_from_none(monkeypatch: pytest.MonkeyPatch) -> None:
    old = ModuleType("old")
    old.AESGCM = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", old)
    with pytest.raises(SpillUnavailable, match="older than 47"):
        Encryption()
