"""`stormd serve`: reads the settings and runs the daemon until it is told to stop.

A setting that cannot be used is refused before anything is opened.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from stormd.config import Config, Option, config_options, default_of
from stormd.errors import ConfigError, PoolUnavailable
from stormd.example_config import render_example, render_value
from stormd.machine import memory_limit
from stormd.monitoring.logs import logging_process
from stormd.notify import MANAGER_VARIABLE
from stormd.output import EXIT_OK, EXIT_RESTART, write_line
from stormd.settings import OPTIONS, load_config
from stormd.sizes import format_size

__all__ = ["HELP", "add_arguments", "check_pool", "fit_pool", "run"]

HELP = "run the daemon in the foreground until SIGTERM or SIGINT"

_LOGGER: Final = logging.getLogger("stormd.serve")

_MIB: Final = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML file with settings (default: none)"
    )
    parser.add_argument(
        "--example-config", action="store_true", help="print a commented settings file and exit"
    )
    for option in config_options():
        _add_flag(parser, option)


def run(args: argparse.Namespace) -> int:
    if args.example_config:
        write_line(render_example().rstrip())
        return EXIT_OK
    flags = {option.name: getattr(args, option.name) for option in config_options()}
    read = functools.partial(_read, flags, args.config)
    config = read()
    if config.resumable and not os.environ.get(MANAGER_VARIABLE):
        # No manager keeps the state that outlives the daemon, so this process does.
        from stormd.supervise.holder import hold

        return hold([sys.executable, "-m", "stormd", *args.given])
    with (
        _lack_as_pool_unavailable(),
        logging_process(config.log_format, config.log_level, sys.stderr.fileno()) as terminal,
    ):
        _warn_of_missing_library()
        # The daemon's modules load here, so that no other command waits for them.
        from stormd.running import run_daemon

        is_followed = run_daemon(config, read if args.config is not None else None, terminal)
    return EXIT_RESTART if is_followed else EXIT_OK


def _read(flags: dict[str, Any], path: Path | None) -> Config:
    return fit_pool(load_config(flags=flags, path=path), memory_limit())


def fit_pool(config: Config, limit: int) -> Config:
    """Return the settings, with a pool that fits into `limit`, the memory the process may use.

    A pool of the default size that is committed as it is used is reduced: pool and cache then take
    at most three quarters of the memory.

    Raises:
        ConfigError: pool and cache are larger than the memory.
    """
    most = limit // 4 * 3
    is_chosen = config.pool_bytes != default_of(OPTIONS["pool_bytes"])
    if config.pool_commit == "use" and not is_chosen and config.host_bytes > most:
        left = most - (config.host_bytes - config.cache_offset)
        pool = left // 33 * 32 // _MIB * _MIB
        config = replace(config, pool_bytes=max(_MIB, pool))
    check_pool(config, limit)
    return config


def check_pool(config: Config, limit: int) -> None:
    """Raise ConfigError if pool and cache are larger than the memory the process may use."""
    if config.host_bytes > limit:
        raise ConfigError(
            f"pool_bytes is {format_size(config.pool_bytes)} and cache_bytes "
            f"{format_size(config.cache_bytes)}, which take {format_size(config.host_bytes)}; this "
            f"machine or container has {format_size(limit)} of memory: set a smaller --pool-bytes"
        )


@contextlib.contextmanager
def _lack_as_pool_unavailable() -> Iterator[None]:
    """Raise PoolUnavailable if Python runs out of memory or threads, whatever needed them."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "start new thread" not in str(error):
            raise
        raise PoolUnavailable(
            f"the daemon has no memory or no threads left ({error or 'MemoryError'}): raise the "
            "limits of address space (ulimit -v) and of processes (ulimit -u), or lower "
            "encode_threads and --pool-bytes"
        ) from error


def _warn_of_missing_library() -> None:
    from storm_kernels import backends

    library = backends()["cpu"]
    if not library.available:
        _LOGGER.warning(
            "the codec's C library is missing: encoding with NumPy, many times slower",
            extra={"reason": library.detail},
        )


def _shown_default(option: Option) -> str:
    """Return the default as a user would type it."""
    value = default_of(option)
    return "empty" if value in ("", ()) else render_value(option, value).strip('"')


def _add_flag(parser: argparse.ArgumentParser, option: Option) -> None:
    default = option.default_note or _shown_default(option)
    text = f"{option.help} ({option.variable}; default: {default})"
    if option.kind == "switch":
        parser.add_argument(option.flag, action=argparse.BooleanOptionalAction, help=text)
        return
    metavar = "{" + ",".join(option.choices) + "}" if option.choices else option.kind.upper()
    parser.add_argument(option.flag, metavar=metavar, help=text)
