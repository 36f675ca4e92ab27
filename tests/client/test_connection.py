from __future__ import annotations

import json
import os
import threading

import pytest
import storm_client as storm
import torch
from storm_client.connection import Connection
from storm_client.lanes import LaneHello
from support.daemon_process import DaemonProcess

from stormd.protocol import Ping, Pong, Release, Status, StatusRequest


def test_a_forked_child_is_told_to_connect_itself(
    daemon: DaemonProcess, client: storm.Client
) -> None:
    offload = client.offload(min_bytes=1)
    x = torch.ones(64, 64, requires_grad=True)
    with offload:
        loss = x.exp().sum()
    offload.stats()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, json.dumps(errors_in_child(client, offload)).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        kinds = json.loads(pipe.read())
    os.waitpid(child, 0)
    assert kinds == ["UsageError", "UsageError"]
    loss.backward()  # the child's end harmed nobody
    assert torch.equal(x.grad, x.detach().exp())


def errors_in_child(client: storm.Client, offload: storm.Offload) -> list[str]:
    kinds = []
    for use in (client.status, offload.__enter__):
        try:
            use()
        except storm.StormError as error:
            kinds.append(type(error).__name__)
    client.close()
    return kinds


@pytest.fixture
def connection(daemon: DaemonProcess) -> Connection:
    connection = Connection(daemon.address, LaneHello(device="cpu"), 30)
    for descriptor in connection.descriptors:
        os.close(descriptor)
    connection.start()
    yield connection
    connection.close()


def test_a_request_gets_its_answer(connection: Connection) -> None:
    assert isinstance(connection.request(Ping(), 30), Pong)
    assert isinstance(connection.request(StatusRequest(), 30), Status)


def test_many_threads_request_at_once(connection: Connection) -> None:
    kinds: list[str] = []

    def ask() -> None:
        kinds.extend(type(connection.request(Ping(), 30)).__name__ for _ in range(50))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert kinds == ["Pong"] * 200


def test_an_answer_that_does_not_come(connection: Connection) -> None:
    with pytest.raises(storm.DaemonLost, match=r"did not answer Release within 0\.05 s"):
        connection.request(Release([]), 0.05)  # the protocol has no answer to it


def test_a_deferred_message_leaves_by_itself(connection: Connection) -> None:
    seen = threading.Event()
    connection.on_message = lambda request, message: seen.set()
    connection.on_wake = connection.flush
    with connection.lock:
        connection.defer(next(connection.numbers), StatusRequest())
    assert seen.wait(30)


def test_a_wait_ends_at_its_deadline(connection: Connection) -> None:
    with connection.lock:
        assert not connection.wait(lambda: False, 0.02)
        assert connection.wait(lambda: True, 0.0)


def test_a_wait_ends_when_the_connection_is_closed(connection: Connection) -> None:
    errors: list[str] = []

    def wait() -> None:
        with connection.lock:
            started.set()
            try:
                connection.wait(lambda: False, 60)
            except storm.DaemonLost as error:
                errors.append(str(error))

    started = threading.Event()
    thread = threading.Thread(target=wait)
    thread.start()
    assert started.wait(30)
    connection.close()
    thread.join(30)
    assert errors == ["the connection was closed"]


def test_closing_twice_is_fine(connection: Connection) -> None:
    connection.close()
    connection.close()
    assert connection.lost
    with pytest.raises(storm.DaemonLost, match="closed"):
        connection.request(Ping(), 1)
