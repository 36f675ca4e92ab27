"""The tokens of compiled graphs, which stand for values: stored, held, or parameters.

Autograd holds a token, a CPU tensor of one number, for each value that a forward graph stores for
its backward graph. The token's memory belongs to an object that holds the value. So any alias of
the token keeps the value alive, and dropping the autograd graph frees it.
"""

from __future__ import annotations

import struct
import weakref
from collections import deque
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING

import torch

from storm_client.errors import ActivationLost
from storm_client.saved.versions import SavedVersion

if TYPE_CHECKING:
    from collections.abc import Callable

    from storm_client.compile.stored import Stored
    from storm_client.compile.target import Target

__all__ = ["TOKENS", "Held", "SharedParameter", "Unversioned", "version_of"]

_KEY = struct.Struct("=q")


class Held:
    """A value that is kept with the client."""

    __slots__ = ("__weakref__", "_target", "_version", "nbytes")

    def __init__(self, value: torch.Tensor, target: Target) -> None:
        self.nbytes = value.nbytes
        self._version = version_of(value, SavedVersion.holding)
        self._target = target

    def restore(self) -> torch.Tensor:
        """Return the value."""
        self._target.record_restore()
        self._version.check()
        replaced = self._version.replaced()
        return self._version.token if replaced is None else replaced


class Unversioned:
    """A value that is kept with the client and has no version: inference mode has made it."""

    __slots__ = ("__weakref__", "_value")

    def __init__(self, value: torch.Tensor) -> None:
        self._value = value

    def restore(self) -> torch.Tensor:
        """Return the value."""
        return self._value


class SharedParameter:
    """A parameter from which values are recomputed, in its present memory."""

    __slots__ = ("__weakref__", "_version")

    def __init__(self, value: torch.Tensor) -> None:
        self._version = version_of(value, SavedVersion.holding)

    def restore(self) -> torch.Tensor:
        """Return the parameter as it was, whatever data it has now."""
        self._version.check()
        return self._version.token


class _Owner(bytearray):
    """A token's memory. PyTorch keeps it alive for as long as a tensor lies in it."""

    __slots__ = ("__weakref__", "content")
    content: Held | SharedParameter | Stored | Unversioned


class _OwnerRef(weakref.ref[_Owner]):
    """A weak reference that is appended to a deque when the token's memory is freed."""

    __slots__ = ("key",)
    key: int


class Tokens:
    """All live tokens of this process, by their numbers."""

    def __init__(self) -> None:
        self._owners: dict[int, _OwnerRef] = {}
        self._dead: deque[_OwnerRef] = deque()

    def make(self, content: Held | SharedParameter | Stored | Unversioned) -> torch.Tensor:
        """Return a token whose memory keeps `content` alive."""
        with suppress(IndexError):  # another thread may have taken the last
            while self._dead:
                self._owners.pop(self._dead.popleft().key, None)
        key = next(_KEYS)
        owner = _Owner(_KEY.pack(key))
        owner.content = content
        reference = _OwnerRef(owner, self._dead.append)
        reference.key = key
        self._owners[key] = reference
        with torch._C.DisableTorchFunction():  # a default device does not apply here
            return torch.frombuffer(owner, dtype=torch.int64)

    def content(self, token: torch.Tensor) -> Held | SharedParameter | Stored | Unversioned:
        """Return the content that a token stands for.

        Raises:
            ActivationLost: the token is a copy of one that was freed.
        """
        reference = self._owners.get(int(token))
        owner = None if reference is None else reference()
        if owner is None:
            raise ActivationLost(
                "a value that a compiled graph had stored is gone: saved-tensor hooks around the "
                "graph gave back a copy of what stands for it; leave int64 tensors of one element "
                "to autograd there"
            )
        return owner.content


_KEYS = count(1)
TOKENS = Tokens()


def version_of(value: torch.Tensor, note: Callable[..., SavedVersion], *more: int) -> SavedVersion:
    """Note a value's version by `note`, such that later in-place changes are counted.

    PyTorch runs compiled graphs without the dispatch key by which an alias shares the counter.
    """
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(_COUNTS_CHANGES)
    try:
        torch._C._dispatch_tls_set_dispatch_key_excluded(_COUNTS_CHANGES, False)
        return note(value, *more)
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(_COUNTS_CHANGES, excluded)


_COUNTS_CHANGES = "ADInplaceOrView"
