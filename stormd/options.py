"""One option: its names, and how its value is read from text and checked.

A value that passes `check_value` is of the option's type and inside its limits. An error names the
option or the source of the text, the value, the limit and what to do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

from stormd.errors import ConfigError
from stormd.protocol.variables import PREFIX
from stormd.sizes import format_size, parse_size

__all__ = ["Kind", "Option", "check_value", "parse_host_port", "read_value"]

MAX_UID: Final = (1 << 32) - 2
"""The largest user id; the number above it stands for none."""

Kind = Literal["text", "size", "count", "seconds", "mode", "uids", "switch"]


@dataclass(frozen=True, slots=True)
class Option:
    """The names, limits and help of one field of Config.

    `least` and `most` bound numbers, in the unit of the kind: bytes, seconds or a count.
    If the default depends on the machine, `default_note` says how, and `example` is shown instead.
    A running daemon takes a new value of a `reloadable` option on SIGHUP.
    """

    name: str
    kind: Kind
    help: str
    section: str
    choices: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    default_note: str = ""
    example: Any = None
    reloadable: bool = False

    @property
    def flag(self) -> str:
        """The command-line spelling."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable."""
        return PREFIX + self.name.upper()


def read_value(option: Option, value: Any, source: str) -> Any:
    """Convert text, a list of user ids or a whole number to the field's type; Config checks it."""
    if option.kind == "uids" and isinstance(value, list):
        return tuple(value)
    if option.kind == "seconds" and type(value) is int:
        return float(value)
    if option.kind == "text" and type(value) is int:  # of a TOML file, as in workers = 4
        return str(value)
    if not isinstance(value, str) or option.kind == "text":
        return value
    try:
        return _READERS[option.kind](value.strip())
    except ValueError as error:
        raise ConfigError(f"{source} is {value!r}, {_WANTED[option.kind]}") from error
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


def _read_switch(text: str) -> bool:
    known = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if text.lower() not in known:
        raise ValueError(text)
    return known[text.lower()]


def _read_uids(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())


_READERS: Final[dict[str, Callable[[str], Any]]] = {
    "size": parse_size,
    "count": int,
    "seconds": float,
    "mode": lambda text: int(text.removeprefix("0o"), 8),
    "uids": _read_uids,
    "switch": _read_switch,
}
_WANTED: Final = {
    "text": "not text",
    "size": "not a size: write a whole number of bytes or a text as in 4GiB",
    "count": "not a whole number",
    "seconds": "not a number of seconds",
    "mode": "not permission bits: write them in octal, as in 0o660",
    "uids": "not a list of user ids: write numbers separated by commas",
    "switch": "not a switch: write true or false",
}


def check_value(option: Option, value: Any) -> None:
    if not _has_type(option.kind, value):
        raise ConfigError(f"{option.name} is {value!r}, {_WANTED[option.kind]}")
    if type(value) is int and value.bit_length() > 63:
        raise ConfigError(
            f"{option.name} is {value:#x}"[:60] + ", and must be below 2^63: set "
            f"{option.flag}, {option.variable} or the file's {option.name}"
        )
    if option.choices and value not in option.choices:
        raise ConfigError(f"{option.name} is {value!r}: choose one of {', '.join(option.choices)}")
    if option.kind == "uids" and not all(0 <= uid <= MAX_UID for uid in value):
        raise ConfigError(f"{option.name} is {list(value)}: user ids are from 0 to {MAX_UID}")
    if option.least is not None and not value >= option.least:
        raise ConfigError(_out_of_range(option, value, "at least", option.least))
    if option.most is not None and not value <= option.most:
        raise ConfigError(_out_of_range(option, value, "at most", option.most))


def parse_host_port(address: str) -> tuple[str, int]:
    """Return host and port of `127.0.0.1:9464` or `[::1]:9464`; no name is looked up.

    Raises:
        ConfigError: no host, no port, or a port outside 0 .. 65535.
    """
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    plain = _is_host(host) and (":" not in host or address.startswith("["))
    if not plain or not port.isdecimal() or len(port) > 5 or int(port) > 65535:
        raise ConfigError(
            f"metrics_address is {address!r}, not HOST:PORT with a port of at most 65535: "
            "write it as in 127.0.0.1:9464 or [::1]:9464, or leave it empty for none"
        )
    return host, int(port)


def _is_host(text: str) -> bool:
    """Return whether a text can be looked up: it has no empty label, nor one that is too long."""
    try:
        return bool(text.encode("idna"))
    except UnicodeError:
        return False


def _has_type(kind: Kind, value: Any) -> bool:
    # type() and not isinstance: True is an int to isinstance, and no size.
    if kind == "uids":
        return type(value) is tuple and all(type(uid) is int for uid in value)
    wanted = {"text": str, "seconds": float, "switch": bool}.get(kind, int)
    return type(value) is wanted


def _out_of_range(option: Option, value: float, bound: str, limit: float) -> str:
    return (
        f"{option.name} is {_shown(option.kind, value)}, and must be {bound} "
        f"{_shown(option.kind, limit)}: "
        f"set {option.flag}, {option.variable} or the file's {option.name}"
    )


def _shown(kind: Kind, value: float) -> str:
    if kind == "size":
        return f"{format_size(value)} ({value:.0f} bytes)"
    if kind == "mode":
        return f"0o{int(value):o}"
    return f"{value:g} seconds" if kind == "seconds" else f"{value:.0f}"
