"""The operator's settings, each defined once.

A Config that exists is valid. Only this module has each option's name, default, unit and help;
`stormd.protocol.variables` repeats the names for clients, which do not load this module.
Command-line flags, `STORMD_...` variables, the TOML file (settings.py) and the commented example
file are all derived from the fields below.
"""

from __future__ import annotations

import grp
import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Final, get_args

from stormd.errors import ConfigError
from stormd.memory.arena import GRANULE, slack_of
from stormd.options import Kind, Option, check_value, parse_host_port
from stormd.protocol import ProtocolError, default_addresses, parse_address
from stormd.protocol.limits import MAX_ENTRY_BYTES
from stormd.sizes import format_size

__all__ = ["Config", "Option", "config_options", "default_address", "default_of"]

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30
MAX_WORKERS: Final = 64


def default_address() -> str:
    """Return the default address of this user's daemon: for root, in the system's directory."""
    system, user = default_addresses(os.environ, os.getuid())
    return system if os.getuid() == 0 else user


def _default_threads() -> int:
    return max(1, len(os.sched_getaffinity(0)) - 1)


def _option(kind: Kind, text: str, *, default: Any, **details: Any) -> Any:
    """Return a dataclass field that carries its Option; `default` may be a function.

    A `section` begins with the option that names it.
    """
    metadata = {"kind": kind, "help": text, **details}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


_text, _size, _count, _seconds, _mode, _uids, _switch = (
    partial(_option, kind) for kind in get_args(Kind)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The daemon's settings. Sizes are bytes, times seconds.

    Raises:
        ConfigError: at construction, if a value is of the wrong type or outside its limits.
            The message names the option, the value, the limit and what to do.
    """

    address: str = _text(
        "socket to listen on, ipc:///PATH",
        default=default_address,
        default_note="/run/stormd/stormd.sock for root, else the user's runtime directory",
        example="ipc:///run/stormd/stormd.sock",
        section="listen",
    )
    socket_mode: int = _mode(
        "permission bits of the sockets; 0o660 lets the directory's group in",
        default=0o600,
        least=0o600,
        most=0o777,
    )
    socket_group: str = _text(
        "group that owns the sockets and their directory; empty keeps the daemon's own", default=""
    )
    allowed_uids: tuple[int, ...] = _uids(
        "user ids that may connect; empty means the daemon's own user and root",
        default=(),
        reloadable=True,
    )
    metrics_address: str = _text(
        "where /metrics (Prometheus) and /healthz are served, HOST:PORT; empty for nowhere",
        default="",
        example="127.0.0.1:9464",
        default_note="empty",
    )

    pool_bytes: int = _size(
        "host memory for stored activations; a 32nd part more is taken with it",
        default=4 * GIB,
        least=1 * MIB,
        section="pool",
    )
    pool_commit: str = _text(
        "when the memory of pool and cache is taken and pinned: all of it at start, as suits a "
        "node's service, or as it is used, as far as the machine or container has it",
        default="start",
        choices=("start", "use"),
    )
    cache_bytes: int = _size(
        "further host memory for the shared cache of named tensors; 0 for no cache",
        default=256 * MIB,
        least=0,
    )

    spill_path: str = _text(
        "directory on a local disk for activations that the pool has no room for; empty for no "
        "tier on disk",
        default="",
        default_note="empty",
        example="/var/lib/stormd",
    )
    spill_bytes: int = _size(
        "room there, all of it taken at start; the file has no name and is gone with the daemon",
        default=0,
        least=0,
        default_note="0",
        example=500 * GIB,
    )
    spill_encrypt: str = _text(
        "whether what is written there is encrypted, with a key that is in memory alone; needs the "
        "package cryptography: pip install cryptography",
        default="on",
        choices=("on", "off"),
    )
    spill_threads: int = _count("threads that write and read there", default=4, least=1, most=64)

    resumable: bool = _switch(
        "keep stored entries when the daemon is killed, restarted or upgraded: the next daemon "
        "resumes the trainers' sessions; systemd keeps the memory, or without it a small process "
        "that restarts the daemon",
        default=False,
    )
    message_bytes: int = _size(
        "host memory for waiting messages, of all clients in both directions; beyond it, the user "
        "with the most waiting bytes loses a session",
        default=64 * MIB,
        least=4 * MIB,
    )

    device: str = _text(
        "lanes to offer: cpu, cuda (with cpu beside it), or auto for what the machine has",
        default="auto",
        choices=("auto", "cpu", "cuda"),
        section="lanes",
    )
    workers: str = _text(
        "processes that serve devices beside the one that listens: auto for one a GPU where there "
        "are two or more, off for none, or a number, among which the GPUs are dealt; each has an "
        "equal part of the pool, near its GPU",
        default="auto",
    )
    staging_bytes_cpu: int = _size(
        "shared memory of a cpu session through which its tensors pass",
        default=64 * MIB,
        least=64 * KIB,
    )
    all_staging_bytes_cpu: int = _size(
        "shared memory of all cpu sessions together, beside the pool; 0 for half of what is "
        "available once the pool is there",
        default=0,
        least=0,
    )
    staging_bytes_cuda: int = _size(
        "most device memory that a cuda session is granted for tensors to pass through",
        default=1 * GIB,
        least=64 * KIB,
    )
    part_bytes_cpu: int = _size(
        "largest chunk of a tensor on the cpu lane; at most half the staging",
        default=8 * MIB,
        least=4 * KIB,
        most=MAX_ENTRY_BYTES,
    )
    part_bytes_cuda: int = _size(
        "largest chunk of a tensor on the cuda lane; at most half the staging; a "
        "session takes six times as much of the GPU's memory, four times under CUDA's MPS",
        default=96 * MIB,
        least=4 * KIB,
        most=MAX_ENTRY_BYTES,
    )
    direct_bytes_cuda: int = _size(
        "under CUDA's MPS, chunks of at least so many bytes are stored uncompressed while a "
        "trainer's kernels keep the encoders from running and the link is idle; those with codec "
        "raw always; 0 for none",
        default=16 * MIB,
        least=0,
    )
    link_limit_bytes: int = _size(
        "bytes a second that a device's copies to the pool and back take at the most, each way, as "
        "over a slower link; 0 for no limit",
        default=0,
        least=0,
        reloadable=True,
        example=12 * GIB,
    )
    encode_threads: int = _count(
        "threads of the cpu lane that encode and decode",
        default=_default_threads,
        least=1,
        most=1024,
        default_note="one less than the machine's cores",
        example=8,
    )

    max_sessions: int = _count(
        "sessions at one time", default=64, least=1, most=65536, reloadable=True, section="limits"
    )
    max_sessions_per_uid: int = _count(
        "sessions of one user at one time; 0 for half of max_sessions where allowed_uids names "
        "several users, else for all",
        default=0,
        least=0,
        most=65536,
        reloadable=True,
    )
    max_entries_per_session: int = _count(
        "stored chunks of one session at one time", default=1 << 20, least=1, reloadable=True
    )
    session_quota_bytes: int = _size(
        "pool bytes of one session; 0 sets no quota", default=0, least=0, reloadable=True
    )
    uid_quota_bytes: int = _size(
        "pool bytes of all sessions of one user together; 0 sets no quota",
        default=0,
        least=0,
        reloadable=True,
    )
    session_share_bytes: int = _size(
        "pool bytes kept for each of max_sessions sessions, which no other can take; 0 keeps none",
        default=0,
        least=0,
        reloadable=True,
    )
    lease_seconds: float = _seconds(
        "how long a session outlives its last message", default=5.0, least=0.1, most=86400.0
    )
    resume_seconds: float = _seconds(
        "with resumable, how long trainers wait for the daemon that follows, and that for them",
        default=30.0,
        least=0.1,
        most=3600.0,
    )
    shutdown_seconds: float = _seconds(
        "how long an ordered shutdown may take before what is left is dropped",
        default=10.0,
        least=0.1,
        most=3600.0,
        reloadable=True,
    )
    exit_with_last_client: bool = _switch(
        "end once the last session has ended; for a daemon started by a client", default=False
    )

    log_format: str = _text(
        "text for people, json for one JSON object a line",
        default="text",
        choices=("text", "json"),
        section="log",
    )
    log_level: str = _text(
        "least level that is logged",
        default="info",
        choices=("debug", "info", "warning", "error"),
        reloadable=True,
    )

    @property
    def sessions_per_uid(self) -> int:
        """The most sessions of one user; by default half of all if several users may connect."""
        if self.max_sessions_per_uid:
            return min(self.max_sessions_per_uid, self.max_sessions)
        return max(1, self.max_sessions // 2) if len(self.allowed_uids) > 1 else self.max_sessions

    @property
    def cache_offset(self) -> int:
        """The offset of the cache's memory: after the pool's memory, at a whole page."""
        end = self.pool_bytes // GRANULE * GRANULE + slack_of(self.pool_bytes)
        return -(-end // mmap.PAGESIZE) * mmap.PAGESIZE

    @property
    def host_bytes(self) -> int:
        """The most host memory, in bytes: the pool, the cache, and the slack of both."""
        return self.cache_offset + self.cache_bytes + slack_of(self.cache_bytes)

    def __post_init__(self) -> None:
        for option in config_options():
            check_value(option, getattr(self, option.name))
        _check_address(self.address)
        _check_group(self.socket_group)
        if self.metrics_address:
            parse_host_port(self.metrics_address)
        for lane in ("cpu", "cuda"):
            _check_parts(self, lane)
        _check_shares(self)
        _check_spill(self)
        _check_workers(self)
        if 0 < self.all_staging_bytes_cpu < self.staging_bytes_cpu:
            raise ConfigError(
                f"all_staging_bytes_cpu is {format_size(self.all_staging_bytes_cpu)}, less than "
                f"staging_bytes_cpu, {format_size(self.staging_bytes_cpu)}, of one session: raise "
                "it, lower the other, or set 0"
            )


def config_options() -> tuple[Option, ...]:
    """Return the options in the order of their definition."""
    return _OPTIONS


def default_of(option: Option) -> Any:
    """Return the option's default on this machine."""
    return getattr(Config(), option.name)


# --- checks ---------------------------------------------------------------------------------


def _check_address(address: str) -> None:
    try:
        parse_address(address)
    except ProtocolError as error:
        raise ConfigError(f"{error}; set --address or STORMD_ADDRESS") from error


def _check_group(name: str) -> None:
    if not name:
        return
    try:
        grp.getgrnam(name)
    except (KeyError, ValueError) as error:  # a name with a zero byte is a ValueError
        raise ConfigError(
            f"socket_group is {name!r}, and this machine has no such group: make it with "
            "groupadd, set another, or leave it empty for the daemon's own"
        ) from error


def _check_parts(config: Config, lane: str) -> None:
    """Check that a chunk takes at most half the staging: the next must fit beside it in flight."""
    part: int = getattr(config, f"part_bytes_{lane}")
    staging: int = getattr(config, f"staging_bytes_{lane}")
    if 2 * part > staging:
        raise ConfigError(
            f"part_bytes_{lane} is {format_size(part)}, and must be at most half of "
            f"staging_bytes_{lane}, {format_size(staging)}: lower one or raise the other"
        )


def _check_workers(config: Config) -> None:
    if config.workers in ("auto", "off"):
        return
    if config.workers not in map(str, range(2, MAX_WORKERS + 1)):
        raise ConfigError(
            f"workers is {config.workers!r}: write auto, off, or a number from 2 to {MAX_WORKERS}"
        )
    if config.resumable:
        raise ConfigError(
            f"workers is {config.workers} and resumable is set: what is stored can outlive no "
            "worker; set workers=off for a daemon that is followed, or resumable=false"
        )


def _check_spill(config: Config) -> None:
    if bool(config.spill_path) == bool(config.spill_bytes):
        return
    given, missing = ("spill_path", "spill_bytes")
    if config.spill_bytes:
        given, missing = missing, given
    raise ConfigError(
        f"{given} is set and {missing} is not: a tier on disk needs both, as in "
        "--spill-path /var/lib/stormd --spill-bytes 500GiB"
    )


def _check_shares(config: Config) -> None:
    """Check that pool and quotas cover every share: a share must never be refused."""
    share = config.session_share_bytes
    if config.max_sessions * share > config.pool_bytes:
        raise ConfigError(
            f"session_share_bytes is {format_size(share)}, for max_sessions={config.max_sessions} "
            f"more than pool_bytes, {format_size(config.pool_bytes)}: lower one or raise the pool"
        )
    for name in ("session_quota_bytes", "uid_quota_bytes"):
        if 0 < getattr(config, name) < share:
            raise ConfigError(
                f"{name} is {format_size(getattr(config, name))}, less than session_share_bytes, "
                f"{format_size(share)}: what is kept for a session must be allowed to it"
            )


def _described() -> Iterator[Option]:
    section = ""
    for item in fields(Config):
        details: Mapping[str, Any] = item.metadata
        section = details.get("section", section)
        yield Option(name=item.name, **{**details, "section": section})


_OPTIONS: Final = tuple(_described())
