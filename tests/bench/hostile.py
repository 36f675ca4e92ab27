"""What attacks cost: how much the daemon grows, and how long a neighbour's ping takes meanwhile.

    PYTHONPATH=tests python -m bench.hostile [ATTACK ...] --json tests/bench/results/hostile.json

Each attack is a process of its own, of another user's where this is run by root and the attack says
so, on a daemon of its own. A neighbour pings all the while; what an attack keeps out is told.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import zmq
from bench.recording import parser_of, show
from support.daemon_process import start_daemon
from support.raw_client import RawClient

from stormd.protocol import (
    CACHE_FEATURE,
    PROTOCOL_VERSION,
    CacheCommit,
    CacheFind,
    CachePut,
    Envelope,
    Hello,
    Ping,
    Release,
    StatusRequest,
    Store,
    Welcome,
    encode,
)
from stormd.protocol.limits import MAX_BATCH, MAX_COSTLY, MAX_FRAME_BYTES

SECONDS = 6.0
MIB = 1 << 20
STRANGER_UID = 65534
STRANGER_ROOM = 1024
"""Descriptors that the daemon may have, as a shell starts programs."""


NEWCOMER_SECONDS = 2.0
"""In which somebody new must have a session, or counts as kept out."""


# --- attacks, each in a process of its own ------------------------------------------------------


def nested_arrays(address: str) -> None:
    """Eight connections send frames of a mebibyte of nested arrays."""
    frame = b"\xdc\xff\xff" + b"\x90" * (MAX_FRAME_BYTES - 3)
    _flood(address, 8, lambda: frame, session=False)


def idle_connections(address: str) -> None:
    """Six hundred connections that say nothing."""
    path, lines = address.removeprefix("ipc://"), []
    for _ in range(600):
        lines.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        with suppress(OSError):
            lines[-1].connect(path)
    time.sleep(SECONDS)


def releases(address: str) -> None:
    """Eight sessions send frames of a mebibyte that release entries there are none of."""
    batch = [Envelope(0, Release([1] * MAX_BATCH))] * 255
    frame = encode(batch)
    _flood(address, 8, lambda: frame, session=True)


def unread_states(address: str) -> None:
    """Eight sessions ask for the state and read no answer."""
    frame = encode([Envelope(n, StatusRequest()) for n in range(1, MAX_COSTLY + 1)])
    _flood(address, 8, lambda: frame, session=True, pause=0.0005, RCVHWM=1)


def hellos(address: str) -> None:
    """Seventy times a second a session is opened that never gets its lifeline."""
    clients = []
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        client = RawClient(address)
        clients.append(client)
        with suppress(TimeoutError):
            client.hello(uid=os.getuid())
        time.sleep(1 / 70)


def bad_stores(address: str) -> None:
    """Frames of as many stores as there may be, none of which is valid."""
    store = Store(entry=0, segment=9, offset=0, nbytes=1, dtype="uint8", codec="raw", sequence=0)
    frame = encode([Envelope(1, store)] * MAX_BATCH)
    _flood(address, 1, lambda: frame, session=True, pause=0.05, drain=True)


def expiring_tensors(address: str) -> None:
    """Looks for tensors of the cache while as many as fit run out of time, one after the other."""
    client = RawClient(address).open(features=[CACHE_FEATURE])
    for batch in range(500):
        messages: list[Any] = []
        for number in range(MAX_COSTLY):
            name = f"{batch}-{number}"
            messages += [
                CachePut(
                    name=name, dtype="uint8", shape=[0], nbytes=0, part_bytes=MIB,
                    ttl_seconds=0.5 + 0.001 * batch,
                ),
                CacheCommit([]),
            ]  # fmt: skip
        client.send(*messages)
    frame = encode([Envelope(1, CacheFind("x"))] * MAX_BATCH)
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        client.send_bytes(frame)
        time.sleep(0.1)
        _drain(client)


def _flood(
    address: str,
    count: int,
    frame: Callable[[], bytes],
    *,
    session: bool,
    pause: float = 0.0,
    drain: bool = False,
    **options: int | bytes,
) -> None:
    """Send a frame again and again on several connections, as fast as they are taken."""
    clients = [RawClient(address, **options) for _ in range(count)]
    if session:
        for client in clients:
            client.open(uid=os.getuid())
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        for client in clients:
            with suppress(zmq.Again):
                client.socket.send(frame(), zmq.NOBLOCK)
            if drain:
                _drain(client)
        time.sleep(pause)


def _drain(client: RawClient) -> None:
    with suppress(zmq.Again):
        while True:
            client.socket.recv(zmq.NOBLOCK)


ATTACKS: dict[str, tuple[Callable[[str], None], bool]] = {
    "nested_arrays": (nested_arrays, True),
    "idle_connections": (idle_connections, True),
    "hellos": (hellos, False),
    "releases": (releases, False),
    "unread_states": (unread_states, False),
    "bad_stores": (bad_stores, False),
    "expiring_tensors": (expiring_tensors, False),
}
"""By name, with whether it is a user's who is not allowed."""


# --- what a neighbour sees ----------------------------------------------------------------------


class Neighbour:
    """Pings from a thread until it is stopped."""

    def __init__(self, address: str) -> None:
        self.delays: list[float] = []
        self._client = RawClient(address).open()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._ping)
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()
        self._client.close()

    def _ping(self) -> None:
        while not self._is_over.is_set():
            began = time.monotonic()
            self._client.ask(Ping())
            self.delays.append(time.monotonic() - began)
            time.sleep(0.01)


def attack(name: str) -> dict[str, Any]:
    """Return what an attack does to a daemon and a neighbour."""
    _, is_stranger = ATTACKS[name]
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o711)
        daemon = start_daemon(
            Path(directory), "--pool-bytes=64MiB", "--socket-mode=0666",
            f"--allowed-uids=0,{os.getuid()},{STRANGER_UID - 1}", "--log-level=error",
        )  # fmt: skip
        psutil.Process(daemon.pid).rlimit(psutil.RLIMIT_NOFILE, (STRANGER_ROOM, STRANGER_ROOM))
        neighbour = Neighbour(daemon.address)
        time.sleep(1.0)
        quiet, neighbour.delays = neighbour.delays, []
        process = psutil.Process(daemon.pid)
        before = peak = process.memory_info().rss
        uid = STRANGER_UID if is_stranger else STRANGER_UID - 1
        command = [sys.executable, "-m", "bench.hostile", "--attack", name, daemon.address]
        command += ["--uid", str(uid if os.getuid() == 0 else os.getuid())]
        attacker = subprocess.Popen(command)
        refused = tried = 0
        while attacker.poll() is None:
            peak = max(peak, process.memory_info().rss)
            tried += 1
            refused += not _is_welcome(daemon.address)
            time.sleep(0.1)
        neighbour.stop()
        daemon.stop()
    return {
        "grown_mib": round((peak - before) / MIB, 1),
        "ping_ms_quiet_worst": round(1000 * max(quiet), 1),
        "ping_ms_median": round(1000 * sorted(neighbour.delays)[len(neighbour.delays) // 2], 1),
        "ping_ms_worst": round(1000 * max(neighbour.delays), 1),
        "newcomers": tried,
        "newcomers_kept_out": refused,
    }


def _is_welcome(address: str) -> bool:
    """Whether somebody new gets a session within two seconds."""
    hello = Hello(
        protocol=PROTOCOL_VERSION, features=[], pid=os.getpid(), uid=os.getuid(), device="cpu",
        device_uuid="", staging_bytes=0, name="newcomer",
    )  # fmt: skip
    with suppress(TimeoutError, OSError), RawClient(address) as client:
        client.send(hello)
        welcome = client.wait(lambda _: True, NEWCOMER_SECONDS).message
        if isinstance(welcome, Welcome):
            for descriptor in client.connect_lifeline(welcome.lifeline, welcome.token):
                os.close(descriptor)
            return True
    return False


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("attacks", nargs="*", default=list(ATTACKS))
    parser.add_argument("--attack", nargs=2, metavar=("NAME", "ADDRESS"))
    parser.add_argument("--uid", type=int)
    args = parser.parse_args()
    if args.attack:
        name, address = args.attack
        if args.uid != os.getuid():
            os.setgroups([])
            os.setgid(args.uid)
            os.setuid(args.uid)
        ATTACKS[name][0](address)
        os._exit(0)  # what is unread or unsent is nobody's
    show(args.json, {"attacks": {name: attack(name) for name in args.attacks}})


if __name__ == "__main__":
    main()
