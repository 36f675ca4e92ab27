"""TCP addresses as people write them: `HOST:PORT`, with an IPv6 host in brackets.

A result always has a host and a port in 0 .. 65535. No name is looked up.
"""

from __future__ import annotations

from stormd.errors import ConfigError

__all__ = ["parse_host_port"]


def parse_host_port(address: str) -> tuple[str, int]:
    """Return host and port of `127.0.0.1:9464` or `[::1]:9464`.

    Raises:
        ConfigError: no host, no port, or a port outside 0 .. 65535.
    """
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    plain = ":" not in host or address.startswith("[")
    if not host or not plain or not port.isdecimal() or len(port) > 5 or int(port) > 65535:
        raise ConfigError(
            f"metrics_address is {address!r}, not HOST:PORT with a port of at most 65535: "
            "write it as in 127.0.0.1:9464 or [::1]:9464, or leave it empty for none"
        )
    return host, int(port)
