"""Runs a command with a daemon and CUDA's MPS beside it; both live exactly as long as the command.

Three processes do it, so that whichever is killed, another remains to end the rest:

    stormd run     the front: in the shell's process group; it passes signals on, and ends last
      witness      receives what the whole group receives, so that no signal is passed on twice
      keeper       in a group of its own: starts MPS, daemon and command, and ends them in order
        MPS, daemon    in sessions of their own, out of Ctrl-C's reach
        command        in the front's group, as if the shell had started it

Front and keeper are both child subreapers: they can always find every process that the command
starts, in whatever session. `front.supervise` is what the command line calls; `request` alone is
loaded by every command of stormd.
"""
