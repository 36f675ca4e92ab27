"""The object that a script holds: a connection to a daemon, and what one does with it.

Closing it ends its sessions and, if it started a daemon, that daemon too. How a daemon is found is
`connect.py`'s.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Never

from storm_client.arguments import (
    Layer,
    Modules,
    check_codec,
    check_loss,
    check_options,
    layers_of,
    modules_of,
    plan_options,
    size_of,
)
from storm_client.cache.names import Cache
from storm_client.connect import TIMEOUT, Embedded, OnDaemonLoss, connected, shared_supply
from storm_client.embedded import EmbeddedDaemon
from storm_client.monitoring.status import DaemonStatus
from storm_client.offloading import Offload
from storm_client.policy import Policy
from storm_client.transport.supply import Supply

__all__ = ["Client", "connect", "offload"]


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
        loss: str = "tiled",
        **unknown: Never,
    ) -> Offload:
        """Return a reusable context: what autograd saves inside it goes to the daemon.

        `model` is a module or several, whose parameters and buffers stay on the device, as do
        tensors of less than `min_bytes`, in bytes or as "1MiB". `codec` is "ancf" (lossless) or
        "raw".

        `budget` says how much of what a step saves may stay on the device: "least", "fit" (what
        the device has free), bytes, a size as "12GiB", or a fraction of what is saved as a float;
        by default what STORMD_BUDGET says, else "least".

        Tensors that are cheaper to recompute than to transfer are recomputed, bit for bit. The
        first steps compare each of them, with `verify="always"` every step, by a checksum: only
        that notices a parameter or input that was changed between the passes in a way that
        PyTorch's version counter does not see (`.data`, NumPy, some fused optimizers). `replay`
        switches that off, or names functions of your own that may be recomputed. They
        have to be deterministic, read nothing but their arguments, and change none of them.

        `layers` names modules to checkpoint: `torch.utils.checkpoint.checkpoint` recomputes them
        in the backward pass (`use_reentrant=False`), with its rules. What is saved inside of them
        takes no memory, and what they read and do has to be the same both times. They are modules
        of the model, classes of them, or names as `model.named_modules()` has them; a ModuleList
        stands for its items. No other module is called a second time.

        `loss="tiled"` has `torch.nn.functional.cross_entropy`, which the losses of modules and of
        transformers' models end in, computed in tiles inside the block, as
        `storm_client.cross_entropy` is, where both ways were seen to have the same bits. With
        "plain" it is left alone.

        Raises:
            UsageError: a bad value, an unknown option, or the client is closed.
        """
        sessions = self._supply.current()
        _check_options(unknown)
        least = size_of(min_bytes, "min_bytes")
        check_codec(codec)
        check_loss(loss)
        modules = modules_of(model)
        for device in {p.device for module in modules for p in module.parameters()}:
            if device.type != "meta" and not sessions.lost:
                sessions.of(device)  # now, rather than in the first forward
        options = plan_options(budget, verify, replay)
        named = layers_of(layers, modules)
        policy = Policy(modules, least)
        return Offload.of(self._supply, policy, codec, options, layers=named, loss=loss)

    def status(self) -> DaemonStatus:
        """Return the daemon's state.

        Raises:
            DaemonLost: the daemon is gone or does not answer.
        """
        return self._supply.status(self._timeout)

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


def connect(
    address: str | None = None,
    embedded: Embedded = "auto",
    pool_bytes: int | str | None = None,
    timeout: float = TIMEOUT,
    on_daemon_loss: OnDaemonLoss = "raise",
) -> Client:
    """Connect to a daemon.

    Without `address`, it is the one named by STORMD_ADDRESS, else the system's, else the user's.
    `embedded` says whether a private daemon is started: "auto" if none answers, "never", or
    "always", whatever STORMD_ADDRESS names. With "auto" all clients of the process share one,
    unless they ask for pools of other sizes. `pool_bytes` is how large its pool may grow, in bytes
    or as "8GiB"; without it, what STORMD_POOL_BYTES says, or 4 GiB, or less if the machine or
    container has less. It takes memory as it is used. With "auto" and "never" an address that was
    named, here or in the environment, is never replaced by another daemon. `timeout` is in seconds.

    `on_daemon_loss` is for what is saved after the daemon was lost; what it held raises in any
    case when it is needed. "raise": DaemonLost. "keep": it stays in memory, with one warning,
    until a daemon answers at the same address again.

    Raises:
        UsageError: a malformed address, a value out of range, or an address and "always".
        DaemonUnavailable: no daemon answers, or none may be started.
        ProtocolMismatch: the daemon speaks another version.
    """
    found = connected(address, embedded, pool_bytes, timeout, on_daemon_loss)
    return Client(found.supply, found.embedded, timeout)


def offload(model: Modules = None, **options: Any) -> Offload:
    """Return `Client.offload(model, **options)` of a client that the whole process shares.

    It connects as `connect()` does at the first call, and is closed when the process ends. A
    forked child gets one of its own.

    Raises:
        UsageError: what Client.offload does not take; options of `connect` belong there.
        DaemonUnavailable, ProtocolMismatch: as `connect`.
    """
    modules = modules_of(model)
    _check_options(options)
    return Client(shared_supply(), None, TIMEOUT).offload(modules, **options)


def _check_options(given: Iterable[str]) -> None:
    """Check the names of options by the signatures, which are where options are defined."""
    offers = inspect.signature(Client.offload).parameters.values()
    known = [one.name for one in offers if one.kind is inspect.Parameter.KEYWORD_ONLY]
    check_options(given, known, list(inspect.signature(connect).parameters))
