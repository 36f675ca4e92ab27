"""Real text that is always available: the source of Python's own standard library.

The same interpreter gives the same bytes and the same batches for a seed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

__all__ = ["Corpus", "standard_library_text"]

VOCABULARY: Final = 256
"""Tokens are bytes."""

_TEXT_BYTES: Final = 1 << 20


def standard_library_text() -> bytes:
    """Return the first MiB of the library's modules in the order of their names."""
    text = bytearray()
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= _TEXT_BYTES:
            break
    return bytes(text[:_TEXT_BYTES])


class Corpus:
    """Batches cut from a text at random places."""

    def __init__(self, text: bytes, *, seed: int, device: torch.device) -> None:
        self._tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._generator = torch.Generator().manual_seed(seed)
        self._device = device

    def batch(self, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Return inputs and next tokens, each int64 [rows, length] on the device."""
        last = len(self._tokens) - length - 1
        starts = torch.randint(last, (rows,), generator=self._generator).tolist()
        windows = torch.stack([self._tokens[start : start + length + 1] for start in starts])
        tokens = windows.to(self._device, torch.int64)
        return tokens[:, :-1], tokens[:, 1:]
