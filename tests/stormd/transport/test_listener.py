"""A socket that listens goes on where the process has no descriptor left for a while."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.daemon_thread import DaemonThread
from support.raw_client import RawClient

from stormd.transport import listener as module


def test_a_lack_of_descriptors_is_waited_out(
    daemon: DaemonThread, connect: Callable[..., RawClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = daemon.server._control.listener
    listening = listener._socket
    failures = [OSError(24, "Too many open files")]

    class Scarce:
        def accept(self) -> object:
            if failures:
                raise failures.pop()
            return listening.accept()

        def __getattr__(self, name: str) -> object:
            return getattr(listening, name)

    monkeypatch.setattr(module, "RETRY_SECONDS", 0.01)
    daemon.on_loop(lambda: monkeypatch.setattr(listener, "_socket", Scarce()))
    connect(daemon).open().stored(b"served")
    assert not failures
