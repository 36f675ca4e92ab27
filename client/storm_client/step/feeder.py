"""Feeder: copies a step's inputs to the device before they are needed.

A thread runs the iterable and copies the items that it yields. On a GPU, the copies are made from
pinned memory on a stream of their own, and the consumer's stream waits for them on the device. The
two threads share only a bounded queue, which limits how many items the iterable is ahead.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils import _pytree as pytree

from storm_client.devices import usable
from storm_client.errors import UsageError
from storm_client.step.turns import iterating, waiting

__all__ = ["Feeder"]

POLL_SECONDS = 0.1
"""How often a thread that waits for the queue checks whether it is to end."""


_END = object()


class _Item(NamedTuple):
    value: Any = None
    copied: torch.Event | None = None
    """The event after the copies of `value`."""
    error: BaseException | None = None
    is_end: bool = False


class Feeder(AbstractContextManager["Feeder"]):
    """Iterates over `iterable`, ahead of its consumer, with all tensors on a device.

        for x, y in storm.Feeder(loader, device="cuda"):
            ...

    Tensors and NumPy arrays are copied, so the iterable may reuse its buffers. It is iterated over
    once. An exception of the iterable is raised in place of its item, and ends the iteration. The
    thread ends if the loop is left early, at `close`, or at the end of the `with` block.

    The iterable should draw random numbers from a `torch.Generator` of its own, or in the worker
    processes of a DataLoader. If it draws from PyTorch's global generator while the running step
    does, too (dropout on a CPU), timing decides which numbers each of them gets.
    """

    def __init__(
        self,
        iterable: Iterable[Any],
        *,
        device: str | torch.device | None = None,
        ahead: int = 2,
    ) -> None:
        """Feed the items of `iterable`: tensors, or lists, tuples and dicts of tensors and others.

        `device` is the device for the tensors, by default the current GPU where there is one, else
        the host. Up to `ahead` items wait to be consumed; while one is consumed, another may be
        made.

        Raises:
            UsageError: `ahead` is no integer of at least 1, or there is no such device.
        """
        if type(ahead) is not int or ahead < 1:
            raise UsageError(f"ahead is {ahead!r}; it must be a number of items, at least 1")
        # With its index: in the copying thread another device may be the current one.
        self.device = usable(device if device is not None else _default_device())
        self._iterable = iterable
        self._queue: queue.Queue[_Item] = queue.Queue(ahead)
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._has_begun = False

    def __iter__(self) -> Iterator[Any]:
        """Start the iteration; the thread ends with it, however it ends.

        Raises:
            UsageError: the Feeder was iterated over before, or is closed.
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
        """End the thread, after waiting for the item that it is making.

        Calling it twice is fine.
        """
        self._closed.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        while not self._queue.empty():
            self._queue.get_nowait()

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the consumer's side ----------------------------------------------------------------

    def _next(self) -> _Item:
        with waiting():
            while not self._closed.is_set():
                try:
                    return self._queue.get(timeout=POLL_SECONDS)
                except queue.Empty:
                    self._check_thread()
        return _Item(is_end=True)

    def _check_thread(self) -> None:
        """Raise if no item can arrive any more, as in a process that was forked."""
        thread = self._thread
        is_gone = thread is not None and not thread.is_alive() and self._queue.empty()
        if is_gone and not self._closed.is_set():
            raise UsageError(
                "the thread of the Feeder is not in this process, which was forked since; make "
                "another Feeder here"
            )

    def _received(self, item: _Item) -> Any:
        """Return an item's value for the current stream, which waits for its copies."""
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
            with iterating():
                source = iter(self._iterable)
            stream = torch.Stream(self.device) if self.device.type != "cpu" else None
            while True:
                with iterating():
                    value = next(source, _END)
                if value is _END:
                    self._put(_Item(is_end=True))
                    return
                if not self._put(self._copied(value, stream)):
                    return
        except BaseException as error:  # noqa: BLE001 - it is raised in the consumer's thread
            self._put(_Item(error=error))
        finally:
            close = getattr(source, "close", None)
            if close is not None:
                close()

    def _copied(self, value: Any, stream: torch.Stream | None) -> _Item:
        """Return a copy of an item; the iterable may write to the item from then on."""
        leaves, spec = pytree.tree_flatten(value)
        if stream is None:
            return _Item(pytree.tree_unflatten(self._moved(leaves), spec))
        made = torch.accelerator.current_stream(self.device)
        tensors = [one for one in leaves if isinstance(one, torch.Tensor)]
        is_here = any(one.device == self.device for one in tensors)
        if is_here:
            stream.wait_stream(made)
        with stream:
            moved = self._moved(leaves)
        copied = stream.record_event()
        if is_here:
            made.wait_event(copied)
        if any(_is_in_memory(one) and one.is_pinned() for one in tensors):
            copied.synchronize()
        return _Item(pytree.tree_unflatten(moved, spec), copied)

    def _moved(self, leaves: list[Any]) -> list[Any]:
        """Return copies of tensors and arrays; one that comes twice is one again."""
        moved = {id(one): self._copy(one) for one in leaves}
        return [moved[id(one)] for one in leaves]

    def _copy(self, leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            return leaf.copy()
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.device == self.device:
            return leaf.clone()
        if self.device.type == "cpu":
            return leaf.to(self.device)
        pinned = leaf.pin_memory() if _is_in_memory(leaf) else leaf
        return pinned.to(self.device, non_blocking=True)

    def _put(self, item: _Item) -> bool:
        """Put an item into the queue once there is space; return False if the Feeder is closed."""
        while not self._closed.is_set():
            try:
                self._queue.put(item, timeout=POLL_SECONDS)
            except queue.Full:
                continue
            return True
        return False


def _is_in_memory(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout is torch.strided


def _default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
