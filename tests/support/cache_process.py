"""A process of its own that uses the shared cache, as any user: a test tells it what to do.

It takes a list a time, [word, *arguments], and answers each by one value; an error is answered by
its name and text. Tensors are `count` bytes of one `value`; what is not that is answered as
"mixed". It is forked from a process that has loaded torch once, for all tests of a module.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection
from typing import Any, Self

import storm_client as storm
import torch

_FORKS = get_context("forkserver")


@contextmanager
def cache_nursery() -> Iterator[None]:
    """Have what the processes are forked from run meanwhile, and gone afterwards."""
    _FORKS.set_forkserver_preload(["storm_client.client"])
    forkserver.ensure_running()
    try:
        yield
    finally:
        forkserver._forkserver._stop()  # type: ignore[attr-defined]


class CacheProcess:
    """The parent's end of such a process. Ends it, where it has not ended, on exit."""

    def __init__(self, address: str, uid: int = os.getuid(), gid: int = os.getgid()) -> None:
        self._orders, theirs = _FORKS.Pipe()
        with theirs:
            self._process = _FORKS.Process(target=_obey, args=(theirs, address, uid, gid))
            self._process.start()

    def say(self, *words: Any) -> None:
        """Give an order without waiting for the answer."""
        self._orders.send(words)

    def hear(self) -> Any:
        """Return the answer to the oldest order that has none."""
        return self._orders.recv()

    def ask(self, *words: Any) -> Any:
        """Give an order and return the answer."""
        self.say(*words)
        return self.hear()

    def kill(self) -> None:
        """End it as a crash would."""
        self._process.kill()
        self._process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._process.close()
        self._orders.close()


def _obey(orders: Connection, address: str, uid: int, gid: int) -> None:
    if uid != os.getuid():
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    client = None
    while True:
        order = orders.recv()
        try:
            client = client or storm.connect(address, embedded="never", timeout=30.0)
            answer = _obeyed(client.cache, *order)
        except storm.StormError as error:
            answer = [type(error).__name__, str(error)]
        orders.send(answer)


def _obeyed(cache: Any, word: str, *arguments: Any) -> Any:
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
