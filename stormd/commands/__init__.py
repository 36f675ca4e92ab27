"""The commands of `stormd`, one module each.

A command module has `HELP`, `add_arguments(parser)` and `run(args)`, which returns the exit status.
It loads heavy modules (torch, rich, CUDA) only when it runs.
"""
