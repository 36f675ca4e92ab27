from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import storm_client as storm
import torch
from storm_client.lanes import LaneHello
from storm_client.transport import frames
from storm_client.transport.connection import Connection
from storm_client.transport.io_thread import Listener
from storm_client.transport.lifeline import Lifeline
from support.daemon_process import DaemonProcess
from support.waiting import wait_until

from stormd.protocol import (
    Envelope,
    Message,
    Ping,
    ProtocolError,
    Release,
    StatusRequest,
)


def test_a_forked_child_is_told_to_connect_itself(client: storm.Client) -> None:
    """Also where a thread that it does not have held the lock."""
    offload = client.offload(min_bytes=1)
    x = torch.ones(64, 64, requires_grad=True)
    with offload:
        loss = x.exp().sum()
    offload.stats()
    kinds = errors_in_child(client.status, offload.__enter__, client.close)
    assert kinds == ["UsageError", "UsageError", ""]
    lock = client._supply.sessions.of(torch.device("cpu")).connection.lock
    for use in (client.status, offload.__enter__, loss.backward):
        with held_by_a_thread(lock):
            assert errors_in_child(use) == ["UsageError"]
    loss.backward()  # the child's end harmed nobody
    assert torch.equal(x.grad, x.detach().exp())


@contextmanager
def held_by_a_thread(lock: threading.RLock) -> Iterator[None]:
    """Have another thread hold the lock for a while."""
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            over.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(30)
    yield
    over.set()
    thread.join(30)


def errors_in_child(*uses: Callable[[], object]) -> list[str]:
    """Return the kind of error that each call raises in a forked child, "" for none."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # ends a child that hangs
        os.write(writer, json.dumps([error_of(use) for use in uses]).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        kinds = pipe.read()
    os.waitpid(child, 0)
    return json.loads(kinds)


def error_of(use: Callable[[], object]) -> str:
    try:
        use()
    except Exception as error:  # noqa: BLE001 - its kind is the answer
        return type(error).__name__
    return ""


class Told(Listener):
    """Passes over what it is told; a test may set what else is done with a message."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.handle: Callable[[int, Message], object] = lambda request, message: None

    def on_message(self, request: int, message: Message) -> None:
        self.handle(request, message)

    def close(self) -> None:
        self._connection.close()


def started(daemon: DaemonProcess) -> tuple[Connection, Told]:
    connection = Connection(daemon.address, LaneHello(device="cpu"), 30)
    told = Told(connection)
    connection.start(told)
    return connection, told


@pytest.fixture
def both(daemon: DaemonProcess) -> Iterator[tuple[Connection, Told]]:
    connection, told = started(daemon)
    yield connection, told
    connection.close()


@pytest.fixture
def connection(both: tuple[Connection, Told]) -> Connection:
    return both[0]


@pytest.fixture
def told(both: tuple[Connection, Told]) -> Told:
    return both[1]


def test_many_threads_request_at_once(connection: Connection) -> None:
    def ask(_: int) -> str:
        return type(connection.request(Ping(), 30)).__name__

    with ThreadPoolExecutor(4) as threads:
        assert set(threads.map(ask, range(200))) == {"Pong"}


def test_an_answer_that_does_not_come(connection: Connection) -> None:
    with pytest.raises(storm.DaemonLost, match=r"did not answer Release within 0\.05 s"):
        connection.request(Release([]), 0.05)  # the protocol has no answer to it


@pytest.mark.parametrize("name", ["encode", "decode"])
def test_an_interrupt_loses_no_message(
    connection: Connection, told: Told, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Ctrl-C comes while a message is in flight out or in."""
    real = getattr(frames, name)
    interrupts: list[str] = []

    def interrupted(value: Any) -> Any:
        if threading.current_thread() is threading.main_thread() and not interrupts:
            interrupts.append(name)
            raise KeyboardInterrupt
        return real(value)

    answers: list[Message] = []
    told.handle = lambda request, message: answers.append(message)
    monkeypatch.setattr(frames, name, interrupted)
    with connection.lock:
        connection.post(next(connection.numbers), StatusRequest())
        with pytest.raises(KeyboardInterrupt):
            exchange(connection)
        while not answers:
            assert connection.wait(time.monotonic() + 30)
    assert len(answers) == 1


def exchange(connection: Connection) -> None:
    """Send, and wait for an answer with the lock held: so it is this thread which handles it."""
    connection.flush()
    poller = select.poll()
    poller.register(connection.dealer, select.POLLIN)
    poller.poll(30000)
    connection.flush()


def test_what_no_daemon_may_say_ends_the_connection(
    both: tuple[Connection, Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    connection, _ = both

    def refuses(frame: bytes) -> Any:
        raise ProtocolError("a field is missing")

    with connection.lock:
        connection.post(next(connection.numbers), StatusRequest())
        monkeypatch.setattr(frames, "decode", refuses)
        with pytest.raises(storm.DaemonLost, match="does not allow: a field is missing"):
            exchange(connection)
    assert connection.lost


def test_what_is_interrupted_in_a_handler_is_handled_again_and_the_others_behind_it(
    connection: Connection, told: Told
) -> None:
    handled: list[int] = []

    def handle(request: int, message: Message) -> None:
        handled.append(request)
        if len(handled) == 1:
            raise KeyboardInterrupt

    told.handle = handle
    with connection.lock:
        numbers = [next(connection.numbers) for _ in range(3)]
        connection._messages._inbox.extend(Envelope(number, Ping()) for number in numbers)
        with pytest.raises(KeyboardInterrupt):
            connection.flush()
        connection.flush()
    assert handled == [numbers[0], *numbers]


def test_a_wait_ends_when_the_connection_is_closed(connection: Connection) -> None:
    errors: list[str] = []

    def wait() -> None:
        with connection.lock:
            waits.set()
            try:
                while connection.wait(time.monotonic() + 60):
                    pass
            except storm.DaemonLost as error:
                errors.append(str(error))

    waits = threading.Event()
    thread = threading.Thread(target=wait)
    thread.start()
    assert waits.wait(30)
    connection.close()
    thread.join(30)
    (error,) = errors
    assert "closed, and what it held is gone; call storm_client.connect() for another" in error


def test_a_wait_ends_when_a_signal_handler_closes_just_before_it(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closing(*arguments: Any) -> None:
        monkeypatch.undo()
        connection.close()
        connection.changed.poll(*arguments)

    def wait() -> None:
        with connection.lock:
            while True:
                connection.wait(time.monotonic() + 300)

    monkeypatch.setattr(connection.changed, "poll", closing)
    with ThreadPoolExecutor() as pool:
        assert "was closed" in str(pool.submit(wait).exception(30))


def test_others_have_the_lock_while_goodbye_is_said(
    make_daemon: Callable[..., DaemonProcess],
) -> None:
    """A daemon that stands still lets a close wait; nobody else is to wait with it."""
    daemon = make_daemon("--pool-bytes", "16MiB")
    connection, _ = started(daemon)
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        closing = threading.Thread(target=connection.close)
        closing.start()
        wait_until(lambda: connection.lost, 30)
        assert connection.lock.acquire(timeout=30)
        try:
            assert closing.is_alive(), "it waits for the daemon"
            with pytest.raises(storm.DaemonLost, match="closed"):
                connection.check()
        finally:
            connection.lock.release()
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    closing.join(30)
    assert not closing.is_alive()


def test_a_close_that_is_interrupted_once_it_has_said_goodbye_is_finished_by_the_next(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next waited for it for ever."""

    def interrupted() -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(connection._thread, "end_pause", interrupted)
    with pytest.raises(KeyboardInterrupt):
        connection.close()
    thread = threading.Thread(target=connection.close, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()


def test_what_the_kernel_refuses_is_sent_once_the_daemon_reads(
    make_daemon: Callable[..., DaemonProcess],
) -> None:
    """By the listening thread: nobody makes another call."""
    daemon = make_daemon("--pool-bytes", "16MiB")
    connection, _ = started(daemon)
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        with connection.lock:
            while not connection.dealer.unsent:
                connection.send(0, Release([1] * 256))
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    wait_until(lambda: not connection.dealer.unsent, 30)
    assert not connection.outbox
    connection.request(Ping(), 30)
    connection.close()


def test_a_session_that_ends_alone_is_not_called_the_end_of_the_daemon(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lifeline, "reason", "its answers could not be sent")
    with connection.lock, pytest.raises(storm.DaemonLost, match="ended this session: its answers"):
        connection.daemon_ended()
    assert connection.lost


def test_the_end_of_the_socket_alone_ends_the_connection(
    daemon: DaemonProcess, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon closes it if too much waits on it, and then ends the session; here it is late."""
    monkeypatch.setattr("storm_client.transport.connection.GONE_SECONDS", 0.0)
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        connection.dealer._line.shutdown(socket.SHUT_RDWR)
        wait_until(lambda: connection.lost, 30)
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    with pytest.raises(storm.DaemonLost, match="closed the connection; see its log"):
        connection.check()


def test_closing_where_the_lock_is_held(connection: Connection) -> None:
    """As a destructor does that runs wherever the garbage collector does."""

    def close() -> None:
        with connection.lock:
            connection.close()

    thread = threading.Thread(target=close, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()


def test_closing_in_several_threads(daemon: DaemonProcess) -> None:
    for _ in range(5):
        connection, _ = started(daemon)
        threads = [threading.Thread(target=connection.close) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()


LEFT_OPEN = """
import sys

sys.modules["dill"] = None  # torch imports it where it is, and it keeps __main__ to the very end
import storm_client as storm
import torch

class Trainer:
    def __init__(self):
        self.client = storm.connect(sys.argv[1], timeout=30)
        self.itself = self

    def __del__(self):
        self.client.close()
        print("closed")

trainer = Trainer()
x = torch.ones(64, 64, requires_grad=True)
with trainer.client.offload(min_bytes=1):
    loss = x.exp().sum()
"""


def test_a_client_that_is_open_when_python_ends(daemon: DaemonProcess) -> None:
    command = [sys.executable, "-c", LEFT_OPEN, daemon.address]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert (ended.stdout, ended.stderr) == ("closed\n", "")
