"""`stormd serve`: runs the daemon until it is told to stop.

What stays true: the daemon says "ready" only once the pool is pinned and the socket answers;
SIGTERM and SIGINT end it in order and within its deadline, also while it is starting.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from stormd.commands.output import EXIT_OK, write_line
from stormd.config import Config, Option, config_options, load_config
from stormd.errors import ConfigError
from stormd.example_config import render_example
from stormd.logs import setup_logging
from stormd.machine import memory_limit
from stormd.sizes import format_size

__all__ = ["HELP", "add_arguments", "run"]

HELP = "run the daemon in the foreground until SIGTERM or SIGINT"

OnProgress = Callable[[int, int], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one flag for each setting, and where the settings file is."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with settings")
    parser.add_argument(
        "--example-config", action="store_true", help="print a commented settings file and exit"
    )
    for option in config_options():
        _add_flag(parser, option)


def run(args: argparse.Namespace) -> int:
    """Run the daemon; return once it has ended in order."""
    if args.example_config:
        write_line(render_example().rstrip())
        return EXIT_OK
    flags = {option.name: getattr(args, option.name) for option in config_options()}
    config = load_config(flags=flags, path=args.config)
    check_pool(config, memory_limit())
    setup_logging(config.log_format, config.log_level)
    _run_loop(config)
    return EXIT_OK


def check_pool(config: Config, limit: int) -> None:
    """Raise ConfigError where the pool is larger than the memory the process may use."""
    if config.pool_bytes > limit:
        raise ConfigError(
            f"pool_bytes is {format_size(config.pool_bytes)}, and this machine or container "
            f"has {format_size(limit)} of memory: set a smaller --pool-bytes"
        )


def _add_flag(parser: argparse.ArgumentParser, option: Option) -> None:
    text = f"{option.help} ({option.variable})"
    if option.kind == "switch":
        parser.add_argument(option.flag, action=argparse.BooleanOptionalAction, help=text)
        return
    metavar = "{" + ",".join(option.choices) + "}" if option.choices else option.kind.upper()
    parser.add_argument(option.flag, metavar=metavar, help=text)


def _run_loop(config: Config) -> None:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(config))


async def _serve(config: Config) -> None:
    """Open, serve and close; a signal that comes while the pool is pinned ends it right after."""
    from stormd.server import Server

    loop = asyncio.get_running_loop()
    with _pinning_progress() as progress:
        server = Server(config, on_progress=progress)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.stop)
        await server.open()
    try:
        await server.serve()
    finally:
        await server.close()


@contextlib.contextmanager
def _pinning_progress() -> Iterator[OnProgress | None]:
    """Show a bar on a terminal while the pool is being pinned; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeElapsedColumn

    columns = ("pinning the pool", BarColumn(), DownloadColumn(True), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("pool", total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)
