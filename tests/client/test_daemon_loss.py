"""The daemon's death raises at once in whoever needs it, and never ends in a wrong gradient."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
import storm_client as storm
import torch
from support.daemon_process import DaemonProcess

NOTICED_SECONDS = 60.0
"""Half of what a restore may take without progress: a busy machine takes a while, too."""


def forward(offload: storm.Offload, x: torch.Tensor) -> torch.Tensor:
    with offload:
        h = x.exp()
        for _ in range(3):
            h = (h * h.cos()).tanh()
        return h.sum()


@pytest.fixture
def mortal(make_daemon: Callable[..., DaemonProcess]) -> DaemonProcess:
    return make_daemon("--pool-bytes", "64MiB")


def test_between_forward_and_backward(mortal: DaemonProcess) -> None:
    with storm.connect(mortal.address, timeout=30) as client:
        offload = client.offload(min_bytes=1)
        x = torch.ones(1 << 16, requires_grad=True)
        loss = forward(offload, x)
        offload.stats()
        mortal.kill()
        begin = time.monotonic()
        with pytest.raises(
            storm.DaemonLost, match=r'ended.*repeat the step.*on_daemon_loss="keep"'
        ):
            loss.backward()
        assert time.monotonic() - begin < NOTICED_SECONDS
        assert x.grad is None
        for use in (lambda: forward(offload, x), client.status):
            with pytest.raises(storm.DaemonLost, match=r'connect\(\) again.*on_daemon_loss="keep"'):
                use()


def test_while_a_thread_waits_for_its_bytes(mortal: DaemonProcess) -> None:
    """The daemon is stopped, a backward pass waits for it, and then it is killed."""
    with storm.connect(mortal.address, timeout=30) as client:
        offload = client.offload(min_bytes=1)
        loss = forward(offload, torch.ones(1 << 16, requires_grad=True))
        offload.stats()
        os.kill(mortal.pid, signal.SIGSTOP)
        errors: list[BaseException] = []

        def backward() -> None:
            try:
                loss.backward()
            except storm.DaemonLost as error:
                errors.append(error)

        thread = threading.Thread(target=backward)
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        mortal.kill()
        thread.join(NOTICED_SECONDS)
        assert not thread.is_alive()
        assert len(errors) == 1
