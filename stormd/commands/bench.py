"""`stormd bench`: measures the daemon, the codec and the kernels on this machine.

The programs are in storm_bench, which is loaded only when this command is chosen.
"""

from __future__ import annotations

import argparse

__all__ = ["HELP", "add_arguments", "run"]

HELP = "measure this machine: the daemon, the codec, scans, products, a training step"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from storm_bench import command

    command.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from storm_bench import command

    return command.run(args)
