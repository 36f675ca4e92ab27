"""A child by fork, which has none of the threads of its parent."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable


def status_of_child(run: Callable[[], object]) -> int:
    """Run something in a forked process, for 30 seconds at most, and return its exit status."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(30)
        try:
            run()
        except BaseException as error:  # noqa: BLE001 - the parent sees the status
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]
