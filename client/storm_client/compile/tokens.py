"""What the tokens of compiled graphs stand for: values that are stored, held, or parameters.

Autograd holds a token, a CPU tensor of one number, for each value that a forward graph hands to its
backward graph. Its memory belongs to an object that has the value, so any alias of it keeps that,
and a graph that is dropped gives it up.
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

__all__ = ["TOKENS", "Held", "Lent", "Unversioned", "version_of"]

_KEY = struct.Struct("=q")


class Held:
    """A value that stays here."""

    __slots__ = ("__weakref__", "_target", "_version", "nbytes")

    def __init__(self, value: torch.Tensor, target: Target) -> None:
        self.nbytes = value.nbytes
        self._version = version_of(value, SavedVersion.holding)
        self._target = target

    def bring(self) -> torch.Tensor:
        """Return the value."""
        self._target.goes_back()
        self._version.check()
        replaced = self._version.replaced()
        return self._version.token if replaced is None else replaced


class Unversioned:
    """A value that stays here and has no version: inference mode has made it."""

    __slots__ = ("__weakref__", "_value")

    def __init__(self, value: torch.Tensor) -> None:
        self._value = value

    def bring(self) -> torch.Tensor:
        """Return the value."""
        return self._value


class Lent:
    """A parameter that values are recomputed from, in the memory that it has now."""

    __slots__ = ("__weakref__", "_version")

    def __init__(self, value: torch.Tensor) -> None:
        self._version = version_of(value, SavedVersion.holding)

    def bring(self) -> torch.Tensor:
        """Return what it was, whatever data its parameter has now."""
        self._version.check()
        return self._version.token


class _Owner(bytearray):
    """A token's memory. PyTorch holds it for as long as a tensor lies in it."""

    __slots__ = ("__weakref__", "content")
    content: Held | Lent | Stored | Unversioned


class _OwnerRef(weakref.ref[_Owner]):
    """Tells of a token's death by being appended to a deque."""

    __slots__ = ("key",)
    key: int


class Tokens:
    """All living tokens of this process, by their numbers."""

    def __init__(self) -> None:
        self._owners: dict[int, _OwnerRef] = {}
        self._dead: deque[_OwnerRef] = deque()

    def make(self, content: Held | Lent | Stored | Unversioned) -> torch.Tensor:
        """Return a token for `content`, which lives as long as the token's memory."""
        with suppress(IndexError):  # another thread may have taken the last
            while self._dead:
                self._owners.pop(self._dead.popleft().key, None)
        key = next(_KEYS)
        owner = _Owner(_KEY.pack(key))
        owner.content = content
        reference = _OwnerRef(owner, self._dead.append)
        reference.key = key
        self._owners[key] = reference
        with torch._C.DisableTorchFunction():  # a default device is not for this
            return torch.frombuffer(owner, dtype=torch.int64)

    def content(self, token: torch.Tensor) -> Held | Lent | Stored | Unversioned:
        """Return what a token stands for.

        Raises:
            ActivationLost: it is a copy of one that is gone.
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
    """Note a value's version by `note`, such that later changes are counted.

    PyTorch runs compiled graphs without the dispatch key by which an alias shares the counter.
    """
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(_COUNTS_CHANGES)
    try:
        torch._C._dispatch_tls_set_dispatch_key_excluded(_COUNTS_CHANGES, False)
        return note(value, *more)
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(_COUNTS_CHANGES, excluded)


_COUNTS_CHANGES = "ADInplaceOrView"
