"""A process of its own that uses the shared cache, as any user: a test tells it what to do.

    python tests/support/cache_process.py ADDRESS UID GID

It reads one JSON list a line, [word, *arguments], and answers each by one JSON value; an error is
answered by its name and text. Tensors are `count` bytes of one `value`; what is not that is
answered as "mixed".
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import TracebackType
from typing import Any, Self


class CacheProcess:
    """The parent's end of such a process. Ends it, where it has not ended, on exit."""

    def __init__(self, address: str, uid: int = os.getuid(), gid: int = os.getgid()) -> None:
        command = [sys.executable, __file__, address, str(uid), str(gid)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def say(self, *words: Any) -> None:
        """Give an order without waiting for the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        """Return the answer to the oldest order that has none."""
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def ask(self, *words: Any) -> Any:
        """Give an order and return the answer."""
        self.say(*words)
        return self.hear()

    def kill(self) -> None:
        """End it as a crash would."""
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.communicate()


def main() -> None:
    address, uid, gid = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    import storm_client as storm  # before the user is another, who may not read where it lies

    if uid != os.getuid():
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    client = None
    for line in sys.stdin:
        try:
            client = client or storm.connect(address, embedded="never", timeout=30.0)
            answer = _obeyed(client.cache, *json.loads(line))
        except storm.StormError as error:
            answer = [type(error).__name__, str(error)]
        print(json.dumps(answer), flush=True)


def _obeyed(cache: Any, word: str, *arguments: Any) -> Any:
    import torch

    if word == "put":
        name, value, count = arguments
        cache.put(name, torch.full((count,), value, dtype=torch.uint8))
        return "put"
    if word == "put often":
        name, values, count = arguments
        for value in values:
            cache.put(name, torch.full((count,), value, dtype=torch.uint8))
        return "put"
    if word == "get":
        tensor = cache.get(arguments[0])
        return None if tensor is None else _told(tensor)
    if word == "get often":
        name, times = arguments
        found = [cache.get(name) for _ in range(times)]
        return sorted({str(None if tensor is None else _told(tensor)) for tensor in found})
    return getattr(cache, word)(*arguments)


def _told(tensor: Any) -> Any:
    first, count = int(tensor[0]), tensor.numel()
    return [first, count] if bool((tensor == first).all()) else "mixed"


if __name__ == "__main__":
    main()
