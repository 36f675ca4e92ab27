"""The shared cache: named tensors that the daemon keeps for every process of a user or group.

Under each name there is one complete tensor, bit for bit as it was put, or none; a failed call
changes nothing. Tensors are moved in separate sessions, so that a put of a gigabyte does not occupy
the staging area of a training step.
"""

from __future__ import annotations

import math
import threading
import warnings

import torch

from storm_client.cache.session import CacheSession
from storm_client.devices import usable
from storm_client.errors import CorruptBlob, DaemonUnavailable, ProtocolMismatch, UsageError
from storm_client.transport.sessions import lane_for
from stormd.protocol import (
    CacheDelete,
    CacheFind,
    CacheFound,
    CacheGet,
    CacheList,
    CacheNames,
    CacheTensor,
    Message,
    ProtocolError,
)

__all__ = ["Cache"]

CPU = torch.device("cpu")

MAX_TTL_SECONDS = 1e9
"""About thirty years, the most that a message can carry."""

Names = list[str]
"""An alias, because Cache has a method called list."""


class Cache:
    """Named tensors in the daemon's memory; `Client.cache`. Any thread may use it.

    Every process of the same user can read, replace and delete a tensor; every process of the same
    group can read it. A lookup tries the user's own tensor first, then the group's newest. When
    `cache_bytes` are full, the daemon drops the least recently used tensors, so any tensor may be
    missing later.

    All methods raise UsageError (a bad value, a closed client, a daemon without a cache),
    DaemonUnavailable (no session can be opened) and DaemonLost (the daemon ended, or does not
    answer; the next call connects again).

    Example:
        client.cache.put("vocabulary embeddings", tensor, ttl=3600)
        tensor = client.cache.get("vocabulary embeddings", device="cuda")  # None if it is gone
    """

    def __init__(self, address: str, timeout: float) -> None:
        """Connect to the daemon at `address` when first used."""
        self._address = address
        self._timeout = timeout
        self._lock = threading.Lock()  # protects the two attributes below
        self._sessions: dict[torch.device, CacheSession | None] = {}
        self._closed = False

    def put(self, name: str, tensor: torch.Tensor, ttl: float | None = None) -> None:
        """Keep a copy of `tensor` as `name`, for at most `ttl` seconds from now on.

        `tensor` is strided, of any shape and dtype; gradients and hooks are not kept. Return when
        every process can get the tensor. Of two simultaneous puts, the one completed last remains;
        a process that is reading the other finishes.

        Raises:
            QuotaExceeded: the tensor is larger than the cache, or everything that could be dropped
                for it is being read or put. The name keeps its previous tensor, as after any error.
        """
        ttl_seconds = _seconds(ttl)
        plain = _checked(tensor).detach().resolve_conj().resolve_neg()
        session = self._session(plain.device)
        data = plain.to(session.device).contiguous().reshape(-1).view(torch.uint8)
        session.put(name, plain.dtype, list(plain.shape), ttl_seconds, data)

    def get(self, name: str, device: torch.device | str = "cpu") -> torch.Tensor | None:
        """Return the tensor of that name in new memory on `device`, None if there is none.

        Raises:
            CorruptBlob: the stored bytes were damaged. They are not returned, and the tensor is
                dropped.
            UsageError: `device` cannot be used, or a CUDA graph is being captured on it.
        """
        target = usable(device)
        session = self._session(target)
        found = session.ask(_about(CacheGet, name))
        if not isinstance(found, CacheTensor):
            return None
        dtype = getattr(torch, found.dtype, None)
        data = session.fetch(found)
        if not isinstance(dtype, torch.dtype):
            raise ProtocolMismatch(
                f"{name!r} has the dtype {found.dtype!r}, which torch {torch.__version__} does not "
                "know; use the version that put it"
            )
        if data.numel() != math.prod(found.shape) * dtype.itemsize:
            raise CorruptBlob(
                f"{name!r} has {data.numel()} bytes, which is no {found.dtype} of {found.shape}"
            )
        return data.view(dtype).reshape(found.shape).to(target)

    def contains(self, name: str) -> bool:
        """Return whether a get would find a tensor now; this does not count as a use."""
        return self._found(_about(CacheFind, name))

    def delete(self, name: str) -> bool:
        """Delete this user's tensor of that name; return whether there was one."""
        return self._found(_about(CacheDelete, name))

    def list(self) -> Names:
        """Return the names that this user can get, sorted."""
        names: Names = []
        while True:
            page = self._session(CPU).ask(CacheList(names[-1] if names else ""))
            if not isinstance(page, CacheNames):
                raise ProtocolMismatch(f"CacheList was answered by {type(page).__name__}")
            names += page.names
            if page.complete:
                return names

    def close(self) -> None:
        """End the sessions; tensors that were put remain with the daemon. May be called twice."""
        with self._lock:
            self._closed = True
            sessions = list(self._sessions.values())
        for session in sessions:
            if session is not None:
                session.close()

    # --- helpers ----------------------------------------------------------------------------

    def _found(self, message: Message) -> bool:
        answer = self._session(CPU).ask(message)
        if not isinstance(answer, CacheFound):
            raise ProtocolMismatch(
                f"{type(message).__name__} was answered by {type(answer).__name__}"
            )
        return answer.found

    def _session(self, device: torch.device) -> CacheSession:
        """Return the session of the device, or the host's if the device has none."""
        with self._lock:
            if self._closed:
                raise UsageError("the client is closed; call storm_client.connect() for another")
            session = self._opened(device) or self._opened(CPU)
        assert session is not None, "without a session for the host there is an error"
        return session

    def _opened(self, device: torch.device) -> CacheSession | None:
        session = self._sessions.get(device)
        if session is not None and session.lost:
            session.close()
            del self._sessions[device]
        if device not in self._sessions:
            self._sessions[device] = self._open(device)
        return self._sessions[device]

    def _open(self, device: torch.device) -> CacheSession | None:
        """Return a new session; None, with a warning, if tensors have to pass through the host."""
        try:
            lane = lane_for(device, in_place=False)
            session = CacheSession(self._address, lane, self._timeout)
        except (UsageError, DaemonUnavailable) as error:
            if device == CPU:
                raise
            warnings.warn(
                f"cached tensors of {device} pass through host memory: {error}", stacklevel=5
            )
            return None
        session.end_with(self)
        return session


def _about(kind: type[CacheGet | CacheFind | CacheDelete], name: str) -> Message:
    """Return a message about `name`; raise UsageError if that is not a valid name."""
    try:
        return kind(name)
    except ProtocolError as error:
        raise UsageError(str(error).removeprefix(f"{kind.__name__}.")) from error


def _checked(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor; raise UsageError if its bytes do not describe it completely."""
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"put() got {type(tensor).__name__}; pass a torch.Tensor")
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or is_wrapped:
        kind = "tensor under a torch.func transform" if is_wrapped else type(tensor).__name__
        raise UsageError(
            f"put() got a {kind}, which is more, or other, than its bytes; pass the plain "
            "torch.Tensor that it is made of"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "meta" if tensor.is_meta else str(tensor.layout).removeprefix("torch.")
        raise UsageError(
            f"put() got a {'quantized' if tensor.is_quantized else kind} tensor; pass a plain one, "
            "as from to_dense() or dequantize()"
        )
    if tensor.is_nested:
        raise UsageError("put() got a nested tensor; put the tensors that it is made of")
    return tensor


def _seconds(ttl: float | None) -> float:
    """Return the time to live as a message carries it; raise UsageError for an invalid one."""
    if ttl is None:
        return 0.0
    if isinstance(ttl, bool) or not isinstance(ttl, (int, float)) or not 0 < ttl < MAX_TTL_SECONDS:
        raise UsageError(
            f"ttl is {ttl!r}; it must be seconds above 0 and below {MAX_TTL_SECONDS:g}, or None"
        )
    return float(ttl)
