"""The shell between sockets, ledger and lanes: who may speak, and what a message asks of whom."""

from stormd.gateway.gateway import Gateway
from stormd.gateway.opening import Terms

__all__ = ["Gateway", "Terms"]
