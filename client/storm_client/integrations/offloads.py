"""How integrations make the Offload that they enter: of a client that was passed, or the shared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from storm_client.arguments import Modules
from storm_client.client import Client, offload
from storm_client.errors import UsageError
from storm_client.offloading import Offload

__all__ = ["make_offload"]


def make_offload(client: Client | None, model: Modules, options: Mapping[str, Any]) -> Offload:
    """Return `client.offload(model, **options)`, of the process's shared client for None.

    Raises:
        UsageError: `client` is something else, or what Client.offload does not take.
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
