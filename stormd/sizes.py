"""Sizes in the daemon's settings and messages, as in the protocol, but raising ConfigError."""

from __future__ import annotations

from stormd.errors import ConfigError
from stormd.protocol import sizes
from stormd.protocol.sizes import exact_size, format_size, suggested_pool

__all__ = ["exact_size", "format_size", "parse_size", "suggested_pool"]


def parse_size(text: str) -> int:
    """Return the bytes of `4GiB`, `512 MiB`, `1.5GiB` or plain `4096`.

    Raises:
        ConfigError: not a size, an unknown unit, or not a whole number of bytes.
    """
    try:
        return sizes.parse_size(text)
    except ValueError as error:
        raise ConfigError(str(error)) from error
