"""`stormd upgrade` replaces a daemon under its sessions, or says why it cannot."""

from __future__ import annotations

import os
from typing import Any

import pytest
import storm_client as storm
import torch
from storm_bench.child_daemon import ChildDaemon

from stormd import cli
from stormd.commands import upgrade

UPGRADE = ["upgrade", "--timeout=30"]


def test_a_daemon_is_replaced_and_what_was_stored_is_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tensor = torch.linspace(0, 1, 1 << 16, requires_grad=True)
    with ChildDaemon(flags=["--device=cpu", "--resumable"]) as resumable:
        before = resumable.status()["pid"]
        with storm.connect(resumable.address) as client:
            with client.offload(min_bytes=1):
                loss = tensor.exp().sin().sum()
            assert cli.main([*UPGRADE, "--address", resumable.address]) == 0
            loss.backward()
        after = resumable.status()["pid"]
    assert tensor.grad is not None
    assert torch.equal(tensor.grad, tensor.detach().exp().cos() * tensor.detach().exp())
    said = capsys.readouterr().out
    assert f"(process {before}) was replaced by" in said
    assert f"(process {after}) within" in said
    assert "1 of 1 sessions resumed" in said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "start it with --resumable"),
        (
            {"resumable": True, "sessions": [{"resumable": False, "entries": 2}]},
            "1 sessions, as of trainers on GPUs, cannot be resumed and have stored entries",
        ),
        ({"resumable": True, "pid": os.getppid()}, "run this where the daemon runs"),
    ],
)
def test_a_daemon_is_left_alone_and_it_is_said_why(
    daemon: ChildDaemon,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    said: str,
) -> None:
    """It would take all with it, or some, or the process is none of stormd's here."""
    state = daemon.status()
    monkeypatch.setattr(upgrade, "_state", lambda *_: state | changes)
    assert cli.main([*UPGRADE, "--address", daemon.address]) == 1
    assert said in capsys.readouterr().err
    assert daemon.status()["pid"] == state["pid"]
