"""Offloads the activations of a training script to stormd.

    import storm_client as storm

    with storm.connect() as client:
        offload = client.offload(model)
        for x, y in data:
            with offload:
                loss = model(x, y)
            loss.backward()

Losses and gradients are bit for bit those of the script without offload; otherwise the script gets
an exception of `storm_client.errors`. Importing this package loads neither CuPy nor CUDA, and each
name below loads its module at its first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from storm_client import errors

# Not at its first use: loading `storm_client.compile.backend` would put the package there instead.
from storm_client.compile import (
    compile,  # noqa: A004 - torch.compile's name
    compiled_plans,
    compiled_stats,
)
from storm_client.errors import (
    ActivationLost,
    CorruptBlob,
    DaemonLost,
    DaemonUnavailable,
    ProtocolMismatch,
    QuotaExceeded,
    StormError,
    UsageError,
)

if TYPE_CHECKING:
    from storm_client.cache.names import Cache
    from storm_client.client import Client, connect, offload
    from storm_client.losses.cross_entropy import cross_entropy
    from storm_client.losses.linear import linear_cross_entropy
    from storm_client.monitoring.report import Report
    from storm_client.monitoring.stats import OffloadStats
    from storm_client.monitoring.status import CacheStatus, DaemonStatus, PoolStatus, SessionStatus
    from storm_client.offloading import Offload
    from storm_client.step import compile_step
    from storm_client.step.feeder import Feeder
    from storm_client.step.loops import micro_batches
    from storm_client.step.receiver import Receiver
    from stormd.protocol.version import __version__

_MODULE_OF = {
    "Cache": "storm_client.cache.names",
    "CacheStatus": "storm_client.monitoring.status",
    "Client": "storm_client.client",
    "DaemonStatus": "storm_client.monitoring.status",
    "Feeder": "storm_client.step.feeder",
    "Offload": "storm_client.offloading",
    "OffloadStats": "storm_client.monitoring.stats",
    "PoolStatus": "storm_client.monitoring.status",
    "Receiver": "storm_client.step.receiver",
    "Report": "storm_client.monitoring.report",
    "SessionStatus": "storm_client.monitoring.status",
    "__version__": "stormd.protocol.version",
    "compile_step": "storm_client.step",
    "connect": "storm_client.client",
    "cross_entropy": "storm_client.losses.cross_entropy",
    "linear_cross_entropy": "storm_client.losses.linear",
    "micro_batches": "storm_client.step.loops",
    "offload": "storm_client.client",
}
"""Of the names that are loaded at their first use."""

__all__ = [
    "ActivationLost",
    "Cache",
    "CacheStatus",
    "Client",
    "CorruptBlob",
    "DaemonLost",
    "DaemonStatus",
    "DaemonUnavailable",
    "Feeder",
    "Offload",
    "OffloadStats",
    "PoolStatus",
    "ProtocolMismatch",
    "QuotaExceeded",
    "Receiver",
    "Report",
    "SessionStatus",
    "StormError",
    "UsageError",
    "__version__",
    "compile",
    "compile_step",
    "compiled_plans",
    "compiled_stats",
    "connect",
    "cross_entropy",
    "errors",
    "linear_cross_entropy",
    "micro_batches",
    "offload",
]


if not TYPE_CHECKING:  # else a type checker would take any name for one of this module

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_MODULE_OF[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
