"""`stormd upgrade` replaces a daemon under its sessions, or says why it cannot."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import storm_client as storm
import torch
from storm_bench.child_daemon import ChildDaemon

from stormd import cli
from stormd.commands import upgrade

UPGRADE = ["upgrade", "--timeout=30"]


@pytest.fixture
def resumable() -> Iterator[ChildDaemon]:
    with ChildDaemon(flags=["--device=cpu", "--resumable"]) as daemon:
        yield daemon


def test_a_daemon_is_replaced_and_what_was_stored_is_there(
    resumable: ChildDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    before = resumable.status()["pid"]
    with storm.connect(resumable.address) as client:
        tensor = torch.linspace(0, 1, 1 << 16, requires_grad=True)
        with client.offload(min_bytes=1):
            loss = tensor.exp().sin().sum()
        assert cli.main([*UPGRADE, "--address", resumable.address]) == 0
        loss.backward()
    assert tensor.grad is not None
    assert torch.equal(tensor.grad, tensor.detach().exp().cos() * tensor.detach().exp())
    said = capsys.readouterr().out
    after = resumable.status()["pid"]
    assert f"(process {before}) was replaced by" in said
    assert f"(process {after}) within" in said
    assert "1 of 1 sessions resumed" in said


def test_a_daemon_that_would_take_all_with_it_is_left_alone(
    daemon: ChildDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    pid = daemon.status()["pid"]
    assert cli.main([*UPGRADE, "--address", daemon.address]) == 1
    assert "start it with --resumable" in capsys.readouterr().err
    assert daemon.status()["pid"] == pid


def test_a_process_that_is_no_daemon_here_is_not_touched(
    resumable: ChildDaemon,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    state = resumable.status() | {"pid": os.getppid()}
    monkeypatch.setattr(upgrade, "_state", lambda *_: state)
    assert cli.main([*UPGRADE, "--address", resumable.address]) == 1
    assert "run this where the daemon runs" in capsys.readouterr().err
