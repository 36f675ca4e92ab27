"""Receiver: copies results from the device to the host without a stall.

A value that is sent is copied to the host after the work that computes it. A thread waits for the
copy and calls back, in the order of sending. A script that reads a loss with `.item()` waits for
all work that it has queued. With a Receiver, the device is never idle for this reason.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils import _pytree as pytree

from storm_client.errors import UsageError
from storm_client.step.loops import CAPTURING

__all__ = ["Receiver"]


class _Sent(NamedTuple):
    values: tuple[Any, ...]
    named: dict[str, Any]
    copied: list[torch.Event]


class Receiver(AbstractContextManager["Receiver"]):
    """Calls `callback` with the values sent to it: on the host, in order, in a thread of its own.

        with storm.Receiver(lambda step, loss: print(step, float(loss))) as receive:
            for step, (x, y) in enumerate(data):
                ...
                receive(step, loss)

    The thread, and the callback with it, stays until `close` or the end of the `with` block.

    An exception of the callback is raised at the next call, or at `close`; the callback is not
    called again after it. The callback may send to its own Receiver while the queue has space, but
    must not close it.
    """

    def __init__(self, callback: Callable[..., object], *, waiting: int = 64) -> None:
        """Call `callback` for each call of this; up to `waiting` calls wait, a further one blocks.

        Raises:
            UsageError: `callback` cannot be called, or `waiting` is no integer of at least 1.
        """
        if not callable(callback):
            raise UsageError(f"callback is of type {type(callback).__name__}; pass a function")
        if type(waiting) is not int or waiting < 1:
            raise UsageError(f"waiting is {waiting!r}; it must be a number of calls, at least 1")
        self._callback = callback
        self._queue: queue.Queue[_Sent | None] = queue.Queue(waiting)
        self._error: BaseException | None = None
        self._closed = self._has_end = False
        self._lock = threading.Lock()  # protects these and _thread; nothing is queued after the end
        self._thread: threading.Thread | None = None

    def __call__(self, *values: Any, **named: Any) -> None:
        """Send values: tensors, lists, tuples and dicts of tensors, and anything else as it is.

        Tensors may be modified as soon as this returns. The callback gets copies without gradient,
        on the host, with the same shapes and dtypes. Tensors that are on the host already are
        copied, too.

        Raises:
            UsageError: the Receiver is closed, the callback would wait for itself by sending, a
                step sends while it is captured, a tensor is one of a transform of torch.func, or
                the process was forked since.
            Exception: whatever the callback has raised since the last call.
        """
        if CAPTURING.loop is not None:
            raise UsageError(
                "the step sends to a Receiver, and would do so only while it is captured; return "
                "the values, and send them from the code that calls the step"
            )
        self._raise_error()
        self._check_open()
        (taken, taken_named), event = _taken((values, named))
        sent = _Sent(taken, taken_named, event)
        if self._is_called_back():
            self._send_from_callback(sent)
            return
        with self._lock:
            self._check_open()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="storm-receiver", daemon=True
                )
                self._thread.start()
            if not self._thread.is_alive():
                raise UsageError(
                    "the thread of the Receiver is not in this process, which was forked since; "
                    "make another Receiver here"
                )
            self._queue.put(sent)

    def close(self) -> None:
        """Wait until all sent values have been called back, and end the thread.

        Calling it twice is fine.

        Raises:
            UsageError: the callback itself calls this.
            Exception: whatever the callback has raised since the last call.
        """
        if self._is_called_back():
            raise UsageError(
                "a Receiver is closed by its own callback, and would wait for that; raise an "
                "exception there, which the next call raises, or close it where it was made"
            )
        with self._lock:
            self._closed = True
            if self._thread is not None and self._thread.is_alive() and not self._has_end:
                self._queue.put(None)
                self._has_end = True
        if self._thread is not None:
            self._thread.join()
        self._raise_error()

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        """Close; an exception of the block is not replaced by one of the callback."""
        try:
            self.close()
        except BaseException:
            if error is None:
                raise

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the Receiver is closed; make another")

    def _is_called_back(self) -> bool:
        return threading.current_thread() is self._thread

    def _send_from_callback(self, sent: _Sent) -> None:
        """Send from the Receiver's own thread, which empties the queue and must not wait for it."""
        try:
            self._queue.put_nowait(sent)
        except queue.Full:
            raise UsageError(
                f"the callback sends to its own Receiver while {self._queue.maxsize} calls wait, "
                "and would wait for itself; send from elsewhere, or raise waiting="
            ) from None

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        has_failed = False
        while (sent := self._queue.get()) is not None:
            if has_failed:
                continue  # waiting calls are dropped, so that no sender blocks
            try:
                for one in sent.copied:
                    one.synchronize()
                self._callback(*sent.values, **sent.named)
            except BaseException as error:  # noqa: BLE001 - it is raised in the caller's thread
                self._error = error
                has_failed = True


def _taken(values: Any) -> tuple[Any, list[torch.Event]]:
    """Return copies on the host, and for each device an event that follows its copies."""
    devices: set[torch.device] = set()

    def take(tensor: torch.Tensor) -> torch.Tensor:
        if is_functorch_wrapped_tensor(tensor):
            raise UsageError(
                "a Receiver was sent a tensor within torch.func's grad or vmap, which is only a "
                "part of a computation there; return it, and send it outside"
            )
        tensor = tensor.detach()
        if tensor.device.type == "cpu":
            return tensor.clone()
        devices.add(tensor.device)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    copied = pytree.tree_map_only(torch.Tensor, take, values)
    return copied, [torch.accelerator.current_stream(one).record_event() for one in devices]
