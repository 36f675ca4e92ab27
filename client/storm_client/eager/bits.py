"""Checks whether memory holds the same bits, by checksum or comparison; copies keep the layout."""

from __future__ import annotations

from ctypes import CDLL, c_char, c_size_t, c_void_p, memmove
from typing import Final

import numpy as np
import torch

from storm_client.errors import ActivationLost
from storm_client.saved.versions import View

__all__ = ["checksum", "compare", "copied", "same_bits"]

CHECKSUM_COLUMNS = 4096


def checksum(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return sums over a storage, on its device, that differ if any of its words differs.

    The sums weigh each word by its row and its column, so that swapped words are detected, too.
    """
    if storage.device.type == "cpu":
        return _checksum_on_host(storage)
    words = _words(storage)
    columns = min(len(words), CHECKSUM_COLUMNS)
    whole = len(words) // columns * columns
    table = words[:whole].view(-1, columns)
    rows = table.sum(1, dtype=torch.int64)
    across = table.sum(0, dtype=torch.int64)
    rest = words[whole:].sum(dtype=torch.int64)
    return torch.stack((_weighed(rows), _weighed(across), rows.sum(), rest))


def _checksum_on_host(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the same sums, computed without PyTorch, in this thread alone.

    A function that PyTorch runs on several threads sets the calling thread's OpenMP thread count to
    the process's count. A later convolution in this thread could then have other bits.
    """
    memory = memoryview((c_char * storage.nbytes()).from_address(storage.data_ptr()))
    words = np.frombuffer(memory, np.int64 if storage.nbytes() % 8 == 0 else np.uint8)
    columns = min(len(words), CHECKSUM_COLUMNS)
    whole = len(words) // columns * columns
    table = words[:whole].reshape(-1, columns)
    sums = [table.sum(axis, dtype=np.int64) for axis in (1, 0)]
    weighed = [(one * np.arange(1, len(one) + 1)).sum() for one in sums]
    rest = words[whole:].sum(dtype=np.int64)
    return torch.tensor([*map(int, weighed), int(sums[0].sum()), int(rest)])


def compare(expected: torch.Tensor, storage: torch.UntypedStorage) -> None:
    """Compare a storage with the checksum of its expected contents; waits for the device.

    Raises:
        ActivationLost: they differ.
    """
    if not torch.equal(expected, checksum(storage)):
        raise ActivationLost(
            f"a saved tensor of {storage.nbytes()} bytes that was recomputed has other bits "
            "than before; something that it is made from was changed without being counted, or "
            "its operation is not deterministic: pass offload(..., replay=False)"
        )


def _weighed(sums: torch.Tensor) -> torch.Tensor:
    return (sums * torch.arange(1, len(sums) + 1, device=sums.device)).sum()


def same_bits(one: torch.UntypedStorage, other: torch.UntypedStorage) -> bool:
    """Return whether two storages hold the same bytes; waits for the device."""
    if one.nbytes() != other.nbytes():
        return False
    if one.device.type == other.device.type == "cpu":
        return not _memcmp(one.data_ptr(), other.data_ptr(), one.nbytes())
    return torch.equal(_words(one), _words(other))


_memcmp: Final = CDLL(None).memcmp
_memcmp.argtypes = (c_void_p, c_void_p, c_size_t)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same strides in a storage of its own, at the same offset.

    A tensor's layout in memory may decide the order in which a function adds its elements.
    """
    storage = tensor.untyped_storage()
    if storage.device.type == "cpu":  # in this thread alone, like `_checksum_on_host`
        copy = torch.UntypedStorage(storage.nbytes())  # type: ignore[no-untyped-call]
        memmove(copy.data_ptr(), storage.data_ptr(), storage.nbytes())
    else:
        nothing = torch.empty(0, dtype=torch.uint8, device=storage.device)
        copy = nothing.set_(storage).clone().untyped_storage()
    return View.of(tensor).rebuild(copy)


def _words(storage: torch.UntypedStorage) -> torch.Tensor:
    nbytes = storage.nbytes()
    dtype = torch.int64 if nbytes % 8 == 0 and storage.data_ptr() % 8 == 0 else torch.uint8
    words = torch.empty(0, dtype=dtype, device=storage.device)
    return words.set_(storage, 0, (nbytes // dtype.itemsize,), (1,))
