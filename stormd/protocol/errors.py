"""What can go wrong with a frame: decoding raises this and nothing else."""

__all__ = ["ProtocolError"]


class ProtocolError(ValueError):
    """A frame, message or address that breaks the protocol. Nothing of it has been acted upon."""
