"""The per-node daemon that keeps training activations in host memory."""

__version__ = "0.1.0"
