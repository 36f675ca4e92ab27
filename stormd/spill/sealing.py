"""What proves that a record is the one that was written: a seal over its bytes and its label.

Whoever opens a record gets the bytes that were sealed under the same label, or is told that it does
not: a bit that changed, a write that was torn or went elsewhere, an older record in its place.
Encrypted, nobody without the key can read or make one. The key is made at start, is held in memory
alone, and dies with the process.
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
    """Whose record it is. `generation` is another for each blob that is ever written, `nbytes` the
    blob's, `number` the record's number in it.
    """

    session: int
    entry: int
    generation: int
    nbytes: int
    number: int

    def pack(self) -> bytes:
        """Return it as it is sealed."""
        return _LABEL.pack(*self)


class Sealer(Protocol):
    """Addresses are host memory; the ranges do not overlap. For any number of threads."""

    @property
    def encrypts(self) -> bool:
        """Whether what is sealed can be read with the key alone."""

    def seal(self, label: Label, source: int, nbytes: int, target: int) -> None:
        """Write `nbytes` from `source`, sealed, and their seal, SEAL_BYTES, to `target`."""

    def open(self, label: Label, source: int, nbytes: int, target: int) -> bool:
        """Write the bytes of `nbytes` and a seal at `source` to `target`; False where they are not
        what was sealed under that label: then anything may be there.
        """


class Encryption:
    """AES-256-GCM of the cryptography package, with a key of this object's own.

    A generation is used once, so no nonce is ever used twice with a key.

    Raises:
        SpillUnavailable: the package is missing, or too old.
    """

    encrypts: Final = True

    def __init__(self) -> None:
        self._cipher: Final = _new_cipher()

    def seal(self, label: Label, source: int, nbytes: int, target: int) -> None:
        """Encrypt."""
        self._cipher.encrypt_into(
            _nonce(label), _view(source, nbytes), label.pack(), _view(target, nbytes + SEAL_BYTES)
        )

    def open(self, label: Label, source: int, nbytes: int, target: int) -> bool:
        """Decrypt; False where key, label and bytes do not go together."""
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
    """Bytes as they are, with a checksum of them and of their label. Keeps no secret."""

    encrypts: Final = False

    def __init__(self) -> None:
        self._codec: Final = ancf.host_backend()

    def seal(self, label: Label, source: int, nbytes: int, target: int) -> None:
        """Copy."""
        found = self._codec.copy_checksum(source, target, nbytes)
        ctypes.memmove(target + nbytes, self._sealed(found, label), SEAL_BYTES)

    def open(self, label: Label, source: int, nbytes: int, target: int) -> bool:
        """Copy; False where the checksums differ."""
        found = self._codec.copy_checksum(source, target, nbytes)
        return ctypes.string_at(source + nbytes, SEAL_BYTES) == self._sealed(found, label)

    @staticmethod
    def _sealed(found: int, label: Label) -> bytes:
        """Return the seal: a checksum of the bytes, and one of that and the label."""
        text = label.pack() + found.to_bytes(8, "little")
        return _CHECKSUM.pack(found, hashlib.blake2b(text, digest_size=8).digest())


def _new_cipher() -> AESGCM:
    try:
        # An optional package: without the tier nobody needs it.
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
