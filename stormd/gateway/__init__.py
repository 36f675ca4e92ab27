"""The shell between sockets, ledger and lanes: who may speak, and what a message asks of whom."""

from stormd.gateway.gateway import ATTACHED, Gateway
from stormd.gateway.opening import Terms

__all__ = ["ATTACHED", "Gateway", "Terms"]
