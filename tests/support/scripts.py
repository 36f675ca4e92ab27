"""Scripts that start in milliseconds: one process loads PyTorch, and forks for each of them.

What stays true: a script is `__main__`, has arguments, an environment and output of its own, and
ends as Python does; when the context is left, no process is.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Self

__all__ = ["Scripts"]


class Scripts:
    """The process that runs them, one after the other; a context manager."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        # one thread: sums in another order would differ in their last bits
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()  # the end of its orders is its end
        assert self._process.returncode == 0

    def lines(self, script: Path, *arguments: str, **environ: str) -> list[str]:
        """Run a script to its end, which has to be one in order; return what it has printed."""
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder) / "out", Path(folder) / "err"
            order = [[str(script), *arguments], environ, str(out), str(err)]
            print(json.dumps(order), file=self._process.stdin, flush=True)
            status = int(self._process.stdout.readline())
            assert status == 0, err.read_text()
            return out.read_text().splitlines()


def _run(command: list[str], environ: dict[str, str], out: str, err: str) -> None:
    """Be the script; an exception is told as by Python."""
    for number, path in ((0, os.devnull), (1, out), (2, err)):
        flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT
        os.dup2(os.open(path, flags), number)
    os.environ.update(environ)
    sys.argv = command
    sys.path[0] = str(Path(command[0]).parent)
    runpy.run_path(command[0], run_name="__main__")


def _main() -> None:
    import storm_client.client
    import storm_client.offloading  # noqa: F401 - and PyTorch with it
    import torch._dynamo  # noqa: F401 - which every optimizer loads

    for line in iter(sys.stdin.readline, ""):
        pid = os.fork()
        if pid == 0:
            _run(*json.loads(line))
            return
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    _main()
