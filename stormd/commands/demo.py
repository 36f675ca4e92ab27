"""`stormd demo`: shows that trainers with offload train exactly as those without.

The programs are in storm_bench, which is loaded only when this command is chosen.
"""

from __future__ import annotations

import argparse

__all__ = ["HELP", "add_arguments", "run"]

HELP = "train a small GPT in two processes, with offload and without, and compare bit for bit"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from storm_bench.demo import command

    command.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from storm_bench.demo import command

    return command.run(args)
