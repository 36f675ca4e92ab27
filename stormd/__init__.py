"""The per-node daemon that keeps training activations in host memory."""

from stormd.protocol.version import __version__

__all__ = ["__version__"]
