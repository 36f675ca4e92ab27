"""The only error that decoding a frame raises."""

__all__ = ["ProtocolError"]


class ProtocolError(ValueError):
    """A frame, message or address that breaks the protocol. None of its content was acted upon."""
