"""The commands of `stormd`, one module each.

What stays true: a command module has `HELP`, `add_arguments(parser)` and `run(args)`, which
returns the exit status; it loads what is heavy (torch, rich, CUDA) only when it runs.
"""
