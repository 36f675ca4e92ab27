"""Offloads the activations of a training script to stormd.

    import storm_client as storm

    with storm.connect() as client:
        offload = client.offload(model)
        for x, y in data:
            with offload:
                loss = model(x, y)
            loss.backward()

Losses and gradients are bit for bit those of the script without offload; otherwise the script gets
an exception of `storm_client.errors`. Importing this package loads neither CuPy nor CUDA.
"""

from storm_client import errors
from storm_client.cache.names import Cache
from storm_client.client import Client, connect, offload
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
