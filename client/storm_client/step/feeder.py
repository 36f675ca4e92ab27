"""Feeder: hands a step's inputs to the device before they are needed.

A thread runs the iterable and copies what it yields; on a GPU the copies go out of pinned memory on
a stream of their own, and the consumer's stream waits for them on the device. A bounded queue is
all that the two threads share, so the iterable is at most so many items ahead.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from storm_client.devices import usable
from storm_client.errors import UsageError

__all__ = ["Feeder"]

POLL_SECONDS = 0.1
"""Between two looks of a thread that waits for room at whether it is to end."""


class _Item(NamedTuple):
    value: Any = None
    copied: torch.Event | None = None
    """Behind the copies of `value`."""
    error: BaseException | None = None
    is_end: bool = False


class Feeder(AbstractContextManager["Feeder"]):
    """Iterates over `iterable`, ahead of its consumer, with all tensors on a device.

        for x, y in storm.Feeder(loader, device="cuda"):
            ...

    It is iterated over once. An exception of the iterable is raised where its item would have come,
    and ends the iteration. Leaving the loop early, `close`, or leaving its `with` block ends the
    thread.

    What the iterable draws at random it should draw from a `torch.Generator` of its own, or in the
    worker processes of a DataLoader: which numbers of PyTorch's global generator it gets, and which
    the step that runs meanwhile (dropout on a CPU), is a matter of timing.
    """

    def __init__(
        self,
        iterable: Iterable[Any],
        *,
        device: str | torch.device | None = None,
        ahead: int = 2,
    ) -> None:
        """Feed what `iterable` yields: tensors, or lists, tuples and dicts of tensors and others.

        `device` is where tensors go, by default the current GPU where there is one, else the host.
        Up to `ahead` items wait to be consumed; while one is consumed, another may be made.

        Raises:
            UsageError: `ahead` is no number of at least 1, or there is no such device.
        """
        if type(ahead) is not int or ahead < 1:
            raise UsageError(f"ahead is {ahead!r}; it must be a number of items, at least 1")
        # With its number: in the thread that copies another device is the current one.
        self.device = usable(device if device is not None else _default_device())
        self._iterable = iterable
        self._queue: queue.Queue[_Item] = queue.Queue(ahead)
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._has_begun = False

    def __iter__(self) -> Iterator[Any]:
        """Begin; the thread ends with the iteration, however that ends.

        Raises:
            UsageError: it was iterated over before, or closed.
        """
        if self._has_begun or self._closed.is_set():
            raise UsageError("a Feeder is iterated over once; make another for the next epoch")
        self._has_begun = True
        return self._iterate()

    def _iterate(self) -> Iterator[Any]:
        self._thread = threading.Thread(target=self._run, name="storm-feeder", daemon=True)
        self._thread.start()
        try:
            while not (item := self._next()).is_end:
                if item.error is not None:
                    raise item.error
                yield self._received(item)
        finally:
            self.close()

    def close(self) -> None:
        """End the thread; it is waited for until the item that it is making is made.

        Calling it twice is fine.
        """
        self._closed.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        while not self._queue.empty():
            self._queue.get_nowait()

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    # --- the consumer's side ----------------------------------------------------------------

    def _next(self) -> _Item:
        while not self._closed.is_set():
            try:
                return self._queue.get(timeout=POLL_SECONDS)
            except queue.Empty:
                self._check_thread()
        return _Item(is_end=True)

    def _check_thread(self) -> None:
        """Raise where nobody will ever hand over an item, as in a process that was forked."""
        thread = self._thread
        is_gone = thread is not None and not thread.is_alive() and self._queue.empty()
        if is_gone and not self._closed.is_set():
            raise UsageError(
                "the thread of the Feeder is not in this process, which was forked since; make "
                "another Feeder here"
            )

    def _received(self, item: _Item) -> Any:
        """Return an item for the current stream, which waits for its copies."""
        if item.copied is not None:
            stream = torch.accelerator.current_stream(self.device)
            stream.wait_event(item.copied)
            for tensor in pytree.tree_leaves(item.value):
                if isinstance(tensor, torch.Tensor) and tensor.device == self.device:
                    tensor.record_stream(stream)
        return item.value

    # --- the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        source: Iterator[Any] | None = None
        try:
            source = iter(self._iterable)
            stream = torch.Stream(self.device) if self.device.type != "cpu" else None
            for value in source:
                if not self._put(self._copied(value, stream)):
                    return
            self._put(_Item(is_end=True))
        except BaseException as error:  # noqa: BLE001 - it is raised in the consumer's thread
            self._put(_Item(error=error))
        finally:
            close = getattr(source, "close", None)
            if close is not None:
                close()

    def _copied(self, value: Any, stream: torch.Stream | None) -> _Item:
        if stream is None:
            return _Item(pytree.tree_map_only(torch.Tensor, lambda one: one.to("cpu"), value))
        with stream:
            moved = pytree.tree_map_only(torch.Tensor, self._moved, value)
        return _Item(moved, stream.record_event())

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cpu" and tensor.layout is torch.strided:
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def _put(self, item: _Item) -> bool:
        """Hand an item over once there is room; False where nobody wants it any more."""
        while not self._closed.is_set():
            try:
                self._queue.put(item, timeout=POLL_SECONDS)
            except queue.Full:
                continue
            return True
        return False


def _default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
