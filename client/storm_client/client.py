"""The client object of a script: a connection to a daemon and its operations.

Closing the client ends its sessions. If the client started a daemon, closing ends the daemon too.
`connecting.py` finds the daemon.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, Never

from storm_client.arguments import (
    Layer,
    Modules,
    check_choice,
    check_options,
    layers_of,
    modules_of,
    plan_options,
    size_of,
)
from storm_client.cache.names import Cache
from storm_client.connecting import TIMEOUT, Embedded, OnDaemonLoss, connected, shared_supply
from storm_client.embedded import EmbeddedDaemon
from storm_client.monitoring.status import DaemonStatus
from storm_client.offloading import Offload, OffloadOptions
from storm_client.transport.daemon_loss import Supply
from stormd.protocol import CODECS

__all__ = ["Client", "connect", "offload"]


class Client:
    """A connection to a daemon; `storm_client.connect` makes it."""

    def __init__(self, supply: Supply, embedded: EmbeddedDaemon | None, timeout: float) -> None:
        """Take ownership of the sessions, and of the private daemon if `embedded` is one."""
        self._supply = supply
        self._embedded = embedded
        self._timeout = timeout
        self._cache = Cache(supply.sessions.address, timeout)

    @property
    def address(self) -> str:
        """The daemon's address."""
        return self._supply.sessions.address

    @property
    def cache(self) -> Cache:
        """Named tensors that the daemon keeps for all processes of this user or group."""
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
        """Return a reusable context manager: tensors that autograd saves inside it are offloaded.

        `model` is a module or several. Their parameters and buffers are kept on the device, and so
        are tensors of less than `min_bytes` (a number of bytes, or a size as "1MiB"). `codec` is
        "ancf" (lossless) or "raw".

        `budget` limits how much of a step's saved tensors may be kept on the device: "least", "fit"
        (as much as the device has free), a number of bytes, a size as "12GiB", or, as a float, a
        fraction of the saved bytes. The default is STORMD_BUDGET, else "least".

        Tensors that are cheaper to recompute than to transfer are recomputed, bit for bit. The
        first steps compare each recomputed tensor; with `verify="always"` every step does, by a
        checksum. Only "always" detects some changes without PyTorch's version counter (`.data`,
        NumPy, some fused optimizers), where the steps compared began alike and did without: of a
        parameter or an input between the passes, or of a result that is recomputed. `replay=False`
        switches recomputation off. A list of your own functions in `replay` allows their
        recomputation: they must be deterministic, read nothing but their arguments, and modify none
        of them.

        `layers` names modules to checkpoint: `torch.utils.checkpoint.checkpoint` recomputes them in
        the backward pass (`use_reentrant=False`), with its rules. Tensors saved inside these
        modules take no memory. The modules must read and do the same in both passes. Name them by
        modules of the model, by classes of modules, or by names from `model.named_modules()`; a
        ModuleList stands for its items. No other module is called a second time.

        `loss="tiled"` computes `torch.nn.functional.cross_entropy` in tiles inside the block, as
        `storm_client.cross_entropy` does, if both ways gave the same bits in a comparison. The
        losses of modules and of transformers' models call this function. With "plain" it is left
        unmodified.

        Raises:
            UsageError: a bad value, an unknown option, or the client is closed.
        """
        sessions = self._supply.current()
        _check_options(unknown)
        least = size_of(min_bytes, "min_bytes")
        check_choice("codec", codec, CODECS)
        check_choice("loss", loss, ("tiled", "plain"))
        modules = modules_of(model)
        for device in {p.device for module in modules for p in module.parameters()}:
            if device.type != "meta" and not sessions.lost:
                sessions.of(device)  # now, rather than in the first forward
        options = plan_options(budget, verify, replay)
        named = layers_of(layers, modules)
        made = OffloadOptions(tuple(modules), least, codec, options, named, loss)
        return Offload.of(self._supply, made)

    def status(self) -> DaemonStatus:
        """Return the daemon's state.

        Raises:
            DaemonLost: the daemon is gone or does not answer.
        """
        return self._supply.status(self._timeout)

    def close(self) -> None:
        """End the sessions; all data still stored is lost. A second call has no effect."""
        self._cache.close()
        self._supply.close()
        if self._embedded is not None:
            self._embedded.close()
            self._embedded = None

    def __enter__(self) -> Client:
        """Return the client."""
        return self

    def __exit__(self, *_: object) -> None:
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

    Without `address`, the client tries the address in STORMD_ADDRESS, else the system's, else the
    user's. `embedded` says whether to start a private daemon: "auto" if none answers, "never", or
    "always", whatever STORMD_ADDRESS names. With "auto" all clients of the process share one
    private daemon, unless they ask for pools of other sizes. `pool_bytes` limits the size of its
    pool, in bytes or as "8GiB". The default is STORMD_POOL_BYTES, else 4 GiB, or less if the
    machine or container has less. The pool takes memory only as it is used. With "auto" and
    "never", another daemon never replaces an address that was named, here or in the environment.
    `timeout` is in seconds.

    `on_daemon_loss` says what to do with tensors saved after the daemon was lost. "raise": raise
    DaemonLost. "keep": keep them in memory, with one warning, until a daemon answers at the same
    address again. In both cases, needing a tensor that the lost daemon held raises.

    Raises:
        UsageError: a malformed address, a value out of range, or an address and "always".
        DaemonUnavailable: no daemon answers, or none may be started.
        ProtocolMismatch: the daemon speaks another version.
    """
    found = connected(address, embedded, pool_bytes, timeout, on_daemon_loss)
    return Client(found.supply, found.embedded, timeout)


def offload(model: Modules = None, **options: Any) -> Offload:
    """Return `Client.offload(model, **options)` of a client that the whole process shares.

    The first call connects as `connect()` does. The connection is closed when the process ends. A
    forked child gets its own connection.

    Raises:
        UsageError: an argument that Client.offload does not accept; pass options of `connect`
            there.
        DaemonUnavailable, ProtocolMismatch: as `connect`.
    """
    modules = modules_of(model)
    _check_options(options)
    return Client(shared_supply(), None, TIMEOUT).offload(modules, **options)


def _check_options(given: Iterable[str]) -> None:
    """Check option names against the signatures of `Client.offload` and `connect`."""
    offers = inspect.signature(Client.offload).parameters.values()
    known = [one.name for one in offers if one.kind is inspect.Parameter.KEYWORD_ONLY]
    check_options(given, known, list(inspect.signature(connect).parameters))
