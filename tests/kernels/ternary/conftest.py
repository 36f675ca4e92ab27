"""What the tests of ternary tensors share: values, memory between guards, every backend here."""

from __future__ import annotations

import numpy as np
from storm_kernels.ternary import cpu, reference
from storm_kernels.ternary.planes import Kind

GUARD = 0xA5
GUARD_BYTES = 96


def host_backends() -> dict[str, object]:
    """Return what computes on NumPy arrays by name: the oracle and every variant of the library."""
    found: dict[str, object] = {"numpy": reference}
    if cpu.probe()[0]:
        found |= {one.name.lower(): cpu.CpuTernary(one) for one in cpu.available_variants()}
    return found


def ternary(*shape: int, seed: int = 0) -> np.ndarray:
    """Return values of -1, 0 and 1."""
    rng = np.random.default_rng([*shape, seed])
    return rng.integers(-1, 2, shape).astype(np.int8)


def planes(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the oracle's planes of (rows, columns) values."""
    return reference.encode(values, Kind.INT8, None)


class Guarded:
    """An array `offset` bytes from a multiple of 64, between guards that must stay as they are."""

    def __init__(self, like: np.ndarray, offset: int = 0) -> None:
        self._memory = np.full(like.nbytes + 2 * GUARD_BYTES + 64 + offset, GUARD, np.uint8)
        first = -(self._memory.ctypes.data + GUARD_BYTES) % 64 + GUARD_BYTES + offset
        self._used = slice(first, first + like.nbytes)
        self.array = self._memory[self._used].view(like.dtype).reshape(like.shape)
        self.array[...] = like

    def check(self) -> None:
        """Assert that nothing around the array was written."""
        around = np.delete(self._memory, self._used)
        assert (around == GUARD).all()
