"""Makes the Offload for an integration, with a given client or the process's shared one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from storm_client.arguments import Modules
from storm_client.client import Client, offload
from storm_client.errors import UsageError
from storm_client.offloading import Offload

__all__ = ["make_offload"]


def make_offload(client: Client | None, model: Modules, options: Mapping[str, Any]) -> Offload:
    """Return `client.offload(model, **options)`; for None, use the process's shared client.

    Raises:
        UsageError: `client` has another type, or as `Client.offload`.
        DaemonUnavailable, ProtocolMismatch: the shared client cannot connect.
    """
    if client is None:
        return offload(model, **options)
    if not isinstance(client, Client):
        raise UsageError(
            f"client is of type {type(client).__name__}; pass what storm_client.connect() "
            "returned, or nothing for the client that the process shares"
        )
    return client.offload(model, **options)
