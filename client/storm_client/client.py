"""The object that a script holds: a connection to a daemon, and what one does with it.

Closing it ends its sessions and, if it started a daemon, that daemon too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Never

from storm_client.arguments import (
    Layer,
    Modules,
    check_codec,
    check_options,
    layers_of,
    modules_of,
    plan_options,
    size_of,
)
from storm_client.cache.names import Cache
from storm_client.embedded import EmbeddedDaemon
from storm_client.errors import ProtocolMismatch
from storm_client.monitoring.status import DaemonStatus
from storm_client.offloading import Offload
from storm_client.policy import Policy
from storm_client.transport.supply import Supply
from stormd.protocol import Status, StatusRequest

__all__ = ["Client"]


class Client:
    """A connection to a daemon; made by `storm_client.connect`."""

    def __init__(self, supply: Supply, embedded: EmbeddedDaemon | None, timeout: float) -> None:
        """Own the sessions, and the daemon if it is our own."""
        self._supply = supply
        self._embedded = embedded
        self._timeout = timeout
        self._cache = Cache(supply.sessions.address, timeout)

    @property
    def address(self) -> str:
        """The address in use."""
        return self._supply.sessions.address

    @property
    def cache(self) -> Cache:
        """Named tensors that the daemon keeps for every process of this user or group."""
        return self._cache

    def offload(
        self,
        model: Modules = None,
        *,
        min_bytes: int | str = 1 << 20,
        codec: str = "ancf",
        budget: str | float | None = None,
        verify: str = "learn",
        replay: bool | Iterable[Callable[..., Any]] = True,
        layers: Layer | Iterable[Layer] = (),
        **unknown: Never,
    ) -> Offload:
        """Return a reusable context: what autograd saves inside it goes to the daemon.

        `model` is a module or several, whose parameters and buffers stay where they are, as do
        tensors of less than `min_bytes`, in bytes or as "1MiB". `codec` is "ancf" (lossless) or
        "raw".

        `budget` says how much of what a step saves may stay on the device: "least", "fit" (what
        the device has free), bytes, a size as "12GiB", or a fraction of what is saved as a float;
        by default what STORMD_BUDGET says, else "least".

        What is sooner computed again than shipped is, where it comes out bit for bit: each such
        tensor is compared in the first steps, with `verify="always"` by a checksum in all.
        `replay` switches that off, or names functions of your own that may be run again. They
        have to be deterministic, to read nothing but their arguments, and to change none of them.

        `layers` names modules whose forward is called again in the backward pass, by
        `torch.utils.checkpoint.checkpoint(use_reentrant=False)`, with its rules: what is saved
        inside of them takes no memory, and what they read and do has to be the same both times.
        They are modules of the model, classes of them, or names as `model.named_modules()` has
        them; a ModuleList stands for its items. Nothing else is called a second time.

        Raises:
            UsageError: a bad value, an unknown option, or the client is closed.
        """
        sessions = self._supply.current()
        check_options(unknown)
        least = size_of(min_bytes, "min_bytes")
        check_codec(codec)
        modules = modules_of(model)
        for device in {p.device for module in modules for p in module.parameters()}:
            if device.type != "meta" and not sessions.lost:
                sessions.of(device)  # now, rather than in the first forward
        options = plan_options(budget, verify, replay)
        named = layers_of(layers, modules)
        return Offload.of(self._supply, Policy(modules, least), codec, options, named)

    def status(self) -> DaemonStatus:
        """Return the daemon's state.

        Raises:
            DaemonLost: the daemon is gone or does not answer.
        """
        sessions = self._supply.current()
        sessions.sweep()
        control = sessions.control
        answer = control.connection.request(StatusRequest(), self._timeout)
        if not isinstance(answer, Status):
            raise ProtocolMismatch(f"StatusRequest was answered by {type(answer).__name__}")
        return DaemonStatus.of(answer.state)

    def close(self) -> None:
        """End the sessions; what is still stored is lost. Calling it twice is fine."""
        self._cache.close()
        self._supply.close()
        if self._embedded is not None:
            self._embedded.close()
            self._embedded = None

    def __enter__(self) -> Client:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()
