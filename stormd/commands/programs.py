"""`stormd bench` and `stormd demo`, whose programs are in storm_bench.

A program is loaded only when its command is chosen.
"""

from __future__ import annotations

import argparse
from importlib import import_module

__all__ = ["BENCH", "DEMO", "Program"]


class Program:
    """A command that `module` carries out."""

    def __init__(self, module: str, text: str) -> None:
        self._module = module
        self.HELP = text

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        import_module(self._module).add_arguments(parser)

    def run(self, args: argparse.Namespace) -> int:
        exit_status: int = import_module(self._module).run(args)
        return exit_status


BENCH = Program(
    "storm_bench.command",
    "measure this machine: the daemon, the codec, scans, products, a training step",
)
DEMO = Program(
    "storm_bench.demo.command",
    "train a small GPT in two processes, with offload and without, and compare bit for bit",
)
