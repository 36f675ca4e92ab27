"""The layer between sockets, ledger and lanes: who may connect, and who handles each message."""

from stormd.gateway.dispatch import Dispatch
from stormd.gateway.gateway import Gateway
from stormd.gateway.opening import Opening, Terms

__all__ = ["Dispatch", "Gateway", "Opening", "Terms"]
