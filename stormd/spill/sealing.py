"""Seals: a seal over a record's bytes and label proves that it is the record that was written.

Opening a record yields the bytes that were sealed under the same label, or reports a failure. It
detects a changed bit, a torn or misplaced write, and an older record in the same place. With
encryption, nobody without the key can read or make a record. The key is made at start, exists only
in memory, and is lost with the process.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from storm_kernels import ancf

from stormd.errors import SpillUnavailable
from stormd.memory.extents import SEAL_BYTES

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

__all__ = ["Checksums", "Encryption", "Label", "Sealer"]

_LABEL: Final = struct.Struct("<QQQQI")
_NONCE: Final = struct.Struct("<QI")
_CHECKSUM: Final = struct.Struct("<Q8s")


class Label(NamedTuple):
    """Identifies a record. `generation` is unique for each blob ever written, `nbytes` is the
    blob's size, `number` the record's number within the blob.
    """

    session: int
    entry: int
    generation: int
    nbytes: int
    number: int

    def pack(self) -> bytes:
        """Return the label as the bytes that are sealed."""
        return _LABEL.pack(*self)


class Sealer(Protocol):
    """Seals and opens records. Addresses are host memory; ranges do not overlap. Thread-safe."""

    def seal(self, label: Label, source: int, nbytes: int, target: int) -> None:
        """Write `nbytes` from `source`, sealed, and then their seal of SEAL_BYTES, to `target`."""

    def open(self, label: Label, source: int, nbytes: int, target: int) -> bool:
        """Open the `nbytes` at `source`, which their seal follows, and write them to `target`.

        Return False if they are not what was sealed under that label; `target` is undefined then.
        """


class Encryption:
    """AES-256-GCM of the cryptography package, with a key of this object's own.

    Each generation is used once, so no nonce is ever used twice with a key.

    Raises:
        SpillUnavailable: the package is missing or too old.
    """

    def __init__(self) -> None:
        self._cipher: Final = _new_cipher()

    def seal(self, label: Label, source: int, nbytes: int, target: int) -> None:
        """Encrypt the bytes and append the authentication tag."""
        self._cipher.encrypt_into(
            _nonce(label), _view(source, nbytes), label.pack(), _view(target, nbytes + SEAL_BYTES)
        )

    def open(self, label: Label, source: int, nbytes: int, target: int) -> bool:
        """Decrypt the bytes; return False if key, label and bytes do not match."""
        from cryptography.exceptions import InvalidTag

        try:
            self._cipher.decrypt_into(
                _nonce(label),
                _view(source, nbytes + SEAL_BYTES),
                label.pack(),
                _view(target, nbytes),
            )
        except InvalidTag:
            return False
        return True


class Checksums:
    """Stores bytes unencrypted, with a checksum of the bytes and of the label."""

    def __init__(self) -> None:
        self._codec: Final = ancf.host_backend()

    def seal(self, label: Label, source: int, nbytes: int, target: int) -> None:
        """Copy the bytes and append the seal."""
        found = self._codec.copy_checksum(source, target, nbytes)
        ctypes.memmove(target + nbytes, self._sealed(found, label), SEAL_BYTES)

    def open(self, label: Label, source: int, nbytes: int, target: int) -> bool:
        """Copy the bytes; return False if the checksums differ."""
        found = self._codec.copy_checksum(source, target, nbytes)
        return ctypes.string_at(source + nbytes, SEAL_BYTES) == self._sealed(found, label)

    @staticmethod
    def _sealed(found: int, label: Label) -> bytes:
        """Return the seal: a checksum of the bytes, and a hash of that checksum and the label."""
        text = label.pack() + found.to_bytes(8, "little")
        return _CHECKSUM.pack(found, hashlib.blake2b(text, digest_size=8).digest())


def _new_cipher() -> AESGCM:
    try:
        # An optional package: only the tier needs it.
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise SpillUnavailable(
            "the tier on disk is encrypted, and the package cryptography is not installed: pip "
            "install cryptography, or write it as it is with --spill-encrypt=off"
        ) from error
    if not hasattr(AESGCM, "encrypt_into"):
        raise SpillUnavailable(
            "the package cryptography is older than 47, which encrypts without copies: pip install "
            "--upgrade cryptography, or write the tier as it is with --spill-encrypt=off"
        )
    return AESGCM(AESGCM.generate_key(bit_length=256))


def _nonce(label: Label) -> bytes:
    return _NONCE.pack(label.generation, label.number)


def _view(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")
