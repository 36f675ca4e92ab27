"""Offloads kept tensors of a device whose memory has run out.

A kept tensor is autograd's object for a tensor that the plan keeps; it is written in Python or in
C++. It is moved only if it is an alias of an operation's result and nobody else holds the result
any more. The backward pass finds it as it finds any offloaded tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, TypeAlias

import torch

from storm_client.devices import is_capturing
from storm_client.monitoring.stats import StatsRecorder
from storm_client.native import loader
from storm_client.planner import OrderHistory, Step
from storm_client.saved.versions import SavedVersion, View
from storm_client.transport.interrupts import SafeWeakSet

if TYPE_CHECKING:
    from storm_client.native import _follow
    from storm_client.saved.versions import KeptTensor
    from storm_client.transport.session import Session

__all__ = ["kept_bytes", "note", "offload_kept"]

MIN_BYTES: Final = 1 << 20
"""Smaller tensors are kept: moving them would free little."""

CODEC: Final = "ancf"

_use_count = torch._C._storage_Use_Count


_Kept: TypeAlias = "KeptTensor | _follow.Kept"

_NOTED: Final[SafeWeakSet[KeptTensor]] = SafeWeakSet()
"""The kept tensors of Python; compiled code knows its own."""


def note(kept: KeptTensor, nbytes: int) -> None:
    """Remember a kept tensor weakly if it may be moved."""
    if nbytes >= MIN_BYTES and kept.is_alias:
        _NOTED.add(kept)


def kept_bytes(device: torch.device) -> int:
    """Return how many kept bytes of a device could be moved if nobody else held them."""
    return sum(map(_nbytes, _storages(device).values()))


def offload_kept(session: Session) -> int:
    """Offload the session's kept tensors that nobody else holds; return the number of bytes.

    Raises:
        DaemonLost: the daemon is gone. Tensors not moved yet are kept.
    """
    device = session.device
    if device.type == "cuda":
        if is_capturing(device):
            return 0
        torch.cuda.synchronize(device)  # any stream may have computed them
    step, stats = Step(OrderHistory()), StatsRecorder()
    moved = sum(_move(group, session, step, stats) for group in _storages(device).values())
    session.send_unshared()
    return moved


def _living() -> Iterator[_Kept]:
    yield from _NOTED
    module = loader.module()
    if module is not None:
        yield from module.kept()


def _storages(device: torch.device) -> dict[int, list[_Kept]]:
    """Return the kept tensors of a device, by storage."""
    found: dict[int, list[_Kept]] = {}
    for kept in _living():
        token = kept.token if kept.is_alias else None
        if type(token) is not torch.Tensor:
            continue  # a tensor that wraps another one has a storage without memory
        if token.device != device or token.layout is not torch.strided:
            continue
        storage = token.untyped_storage()
        if storage.nbytes() >= MIN_BYTES and storage.resizable():
            found.setdefault(storage._cdata, []).append(kept)
    return found


def _nbytes(group: list[_Kept]) -> int:
    token = group[0].token
    return 0 if token is None else token.untyped_storage().nbytes()


def _move(group: list[_Kept], session: Session, step: Step, stats: StatsRecorder) -> int:
    """Move the kept tensors of one storage if nobody else holds it; return the storage's bytes."""
    tokens = [token for kept in group if (token := kept.token) is not None]
    if len(tokens) < len(group):
        return 0  # another thread is moving them
    storage = tokens[0].untyped_storage()
    if _use_count(storage._cdata) != len(tokens) + 1:
        return 0
    record = session.find(storage, tokens[0])
    if record is None:
        record = session.hold(storage, tokens[0].dtype, CODEC, stats)
    for kept, token in zip(group, tokens, strict=True):
        version = SavedVersion.of(token, storage._cdata)
        handle = step.handle(record, View.of(token), version)
        session.saved.add_use(handle)
        kept.move(handle)
    return storage.nbytes()
