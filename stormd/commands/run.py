"""`stormd run`: runs a command beside a daemon and CUDA MPS, and exits as the command did.

The exit status is the command's, or 128 plus the number of the signal that ended it. As in shells,
it is 126 or 127 if the command cannot be started. For failures before the start, it is that of any
other command of stormd.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Final, get_args

from stormd.commands.serve import fit_pool
from stormd.config import Config
from stormd.errors import ConfigError
from stormd.machine import memory_limit
from stormd.protocol import BUDGET_VARIABLE, default_addresses, parse_budget, private_pool_commit
from stormd.query import ADDRESS_VARIABLE
from stormd.settings import OPTIONS, load_config
from stormd.supervise.request import MpsMode, Request, find_program

__all__ = ["HELP", "add_arguments", "run"]

_SPILL_FLAGS: Final = (
    (
        "spill_path",
        "DIR",
        "directory on a local disk for what the pool has no room for (default: none)",
    ),
    ("spill_bytes", "SIZE", "room there, all of it taken at start (default: none)"),
    ("spill_encrypt", "{on,off}", "whether that is encrypted (default: on)"),
)
"""Settings of the daemon that are flags here as well: name, metavar, help."""

HELP = "run a command with a daemon of its own, and CUDA's MPS where it can be had"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "stormd run [--pool-bytes SIZE] [--spill-path DIR --spill-bytes SIZE "
        "[--spill-encrypt {on,off}]] [--resumable] [--budget BUDGET] [--mps MODE] -- COMMAND ..."
    )
    parser.description = (
        f"{parser.description} A daemon that answers already is used as it is; the command "
        "finds it by STORMD_ADDRESS. Its other settings, those of `stormd serve --help`, are "
        "set as STORMD_... variables. What the command leaves running is ended."
    )
    parser.epilog = (
        "exit status: the command's, or 128 + N where signal N ended it; 127 not found, 126 not "
        "executable, 2 wrong usage, 1 no daemon or MPS could be started"
    )
    parser.add_argument(
        "--pool-bytes",
        metavar="SIZE",
        help="host memory for stored activations, as in 64GiB (default: STORMD_POOL_BYTES, else "
        "4GiB)",
    )
    for name, metavar, text in _SPILL_FLAGS:
        parser.add_argument(OPTIONS[name].flag, metavar=metavar, help=text)
    parser.add_argument(
        "--resumable",
        action="store_true",
        help="restart the daemon if it is killed, with everything it stores: the command continues",
    )
    parser.add_argument(
        "--budget",
        metavar="BUDGET",
        help="how much of what a step saves may be kept on the device: least, fit, a size as in "
        f"12GiB, or a fraction as in 0.5; exported as {BUDGET_VARIABLE} (default: as the script "
        "says)",
    )
    parser.add_argument(
        "--mps",
        choices=get_args(MpsMode),
        default="auto",
        help="CUDA's MPS, which lets the daemon's kernels run beside the trainer's: where it can "
        "be had, in any case, or not (default: %(default)s)",
    )
    parser.add_argument(
        "argv", nargs=argparse.REMAINDER, metavar="COMMAND ...", help="what to run, behind --"
    )


def run(args: argparse.Namespace) -> int:
    request = request_of(args, os.environ)
    # The supervisor loads here, so that no other command waits for it.
    from stormd.supervise.front import supervise

    return supervise(request)


def request_of(args: argparse.Namespace, environ: Mapping[str, str]) -> Request:
    """Return the request that the command line makes.

    Raises:
        ConfigError: no command, or a setting that cannot be used.
        CommandUnusable: there is no such program.
    """
    command = args.argv[1:] if args.argv[:1] == ["--"] else args.argv
    if not command:
        raise ConfigError("there is no command to run: stormd run -- python train.py")
    flags = {name: getattr(args, name) for name, _, _ in _SPILL_FLAGS}
    flags |= {"pool_bytes": args.pool_bytes, "pool_commit": private_pool_commit(environ)}
    config = fit_pool(load_config(flags=flags, environ=environ), memory_limit())
    _check_budget(args.budget, environ)
    find_program(command[0], environ)
    named = environ.get(ADDRESS_VARIABLE, "")
    return Request(
        command=tuple(command),
        addresses=(named,) if named else tuple(default_addresses(environ, os.getuid())),
        own_address=named,
        pool_bytes=None if args.pool_bytes is None else config.pool_bytes,
        daemon_flags=(
            *(f"{OPTIONS[name].flag}={text}" for name, text in flags.items() if text is not None),
            *(["--resumable"] if args.resumable else []),
        ),
        budget=args.budget,
        mps=_mps_mode(args.mps, config),
    )


def _check_budget(flag: str | None, environ: Mapping[str, str]) -> None:
    text = environ.get(BUDGET_VARIABLE) or None if flag is None else flag
    source = f"variable {BUDGET_VARIABLE}" if flag is None else "flag --budget"
    if text is None:
        return
    try:
        parse_budget(text)
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from error


def _mps_mode(mode: MpsMode, config: Config) -> MpsMode:
    """Return `mode`, or "off" for "auto" if a daemon started here would run no GPU kernels."""
    return "off" if mode == "auto" and config.device == "cpu" else mode
