"""What is started beside a command, what is exported to it, and that all of it ends, in order."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
from storm_bench.child_daemon import ChildDaemon
from support.fake_mps import FakeMps
from support.supervised import Recorder, Run
from support.waiting import wait_until

SHOW = ["--", "sh", "-c", 'echo "$STORMD_ADDRESS $STORMD_BUDGET $CUDA_MPS_PIPE_DIRECTORY"']


# --- the daemon -----------------------------------------------------------------------------


def test_a_daemon_that_answers_is_used_and_stays(
    start_beside: Callable[..., Run], daemon: ChildDaemon
) -> None:
    status, out, err = start_beside("--pool-bytes=16MiB", "--budget=0.5", *SHOW).end()
    assert (status, out.split()) == (0, [daemon.address, "0.5"])
    assert f"a daemon answers at {daemon.address}: --pool-bytes is not used" in err
    assert daemon.status()["pool"]["capacity_bytes"] == 8 << 20


def test_the_daemon_of_the_user_is_found(
    start: Callable[..., Run], daemon: ChildDaemon, place: Path
) -> None:
    (place / "stormd").mkdir(mode=0o700)
    (place / "stormd" / "stormd.sock").symlink_to(daemon.address.removeprefix("ipc://"))
    assert start(*SHOW).end()[1].split() == [f"ipc://{place}/stormd/stormd.sock"]


def test_one_is_started_where_none_answers(start: Callable[..., Run]) -> None:
    ask = [sys.executable, "-m", "stormd", "status", "--json"]
    status, out, err = start("--pool-bytes=16MiB", "--", *ask).end()
    assert status == 0, err
    assert '"capacity_bytes": 16777216' in out
    assert err == (
        "stormd: nothing was offloaded: if the script trained, does it run its forward pass in "
        "`with offload:`?\n"
    )


def test_one_is_started_at_the_address_that_is_named_and_a_command_that_fails_has_the_last_word(
    start: Callable[..., Run], place: Path
) -> None:
    address = f"ipc://{place}/named/stormd.sock"
    (place / "named").mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as left_behind:  # by a daemon that was killed
        left_behind.bind(address.removeprefix("ipc://"))
    script = 'echo "$STORMD_ADDRESS"; echo why >&2; exit 3'
    run = start("--", "sh", "-c", script, variables={"STORMD_ADDRESS": address})
    assert run.end() == (3, f"{address}\n", "why\n")


def test_a_daemon_that_cannot_start_says_why(start: Callable[..., Run], place: Path) -> None:
    place.chmod(0o777)
    run = start("--", "touch", str(place / "ran"), variables={"STORMD_ADDRESS": f"ipc://{place}/s"})
    status, _, err = run.end()
    assert status == 1
    assert err.startswith("stormd: the daemon ended with status 1: ")
    assert f"run chmod o-w {place}" in err
    assert not (place / "ran").exists()


def test_a_daemon_that_does_not_answer_at_the_address_that_is_named_ends_the_run(
    start: Callable[..., Run], place: Path
) -> None:
    """Else the command would run, and the daemon that cannot start beside the other end later."""
    address = f"ipc://{place}/s"
    with socket.socket(socket.AF_UNIX) as hung:
        hung.bind(str(place / "s"))
        hung.listen()
        command = ["--", "touch", str(place / "ran")]
        status, _, err = start(*command, variables={"STORMD_ADDRESS": address}).end()
    assert status == 1
    assert err == (
        f"stormd: no daemon answers at {address} within 5 s: is it running, and may this user "
        "connect?\n"
    )
    assert not (place / "ran").exists()


def test_a_run_works_where_no_socket_fits_into_the_usual_directories(
    start: Callable[..., Run], place: Path
) -> None:
    place = place / ("deep" * 30)
    place.mkdir()
    run = start(*SHOW, variables={"TMPDIR": str(place), "XDG_RUNTIME_DIR": str(place)})
    status, out, err = run.end()
    assert status == 0, err
    [address] = out.split()
    assert address.startswith("ipc:///tmp/stormd-run-")
    assert not Path(address.removeprefix("ipc://")).parent.exists()


def test_a_daemon_that_dies_is_told_of_once(start: Callable[..., Run], recorder: Recorder) -> None:
    run = start("--", *recorder.command)
    assert recorder.pid
    [daemon] = run.living_named("serve")
    daemon.kill()
    wait_until(lambda: not run.living_named("serve"), 60.0)
    recorder.end()
    status, _, err = run.end()
    assert status == 0, err
    assert err.count("stormd: the daemon ended with status 137, and what it held is lost: ") == 1


# --- what the command leaves ----------------------------------------------------------------


def test_what_a_killed_command_leaves_is_ended(
    start: Callable[..., Run], recorder: Recorder
) -> None:
    worker = "import os, sys, time; os.setsid(); open(sys.argv[1], 'w').close(); time.sleep(1000)"
    path = f"{recorder.path}.worker"
    script = f'"{sys.executable}" -S -c "{worker}" {path} & exec "$@"'
    run = start("--", "sh", "-c", script, "sh", *recorder.command)
    _await_file(path)
    os.kill(recorder.pid, signal.SIGKILL)
    status, _, err = run.end()
    assert status == 128 + signal.SIGKILL
    assert "stormd: ending processes left by the command: " in err
    assert not run.living()


def test_what_takes_no_sigterm_is_killed(
    start_beside: Callable[..., Run], recorder: Recorder
) -> None:
    stubborn = f"trap '' TERM; touch {recorder.path}.worker; while :; do sleep 0.05; done"
    run = start_beside(
        "--", "sh", "-c", f'setsid sh -c "{stubborn}" & exec "$@"', "sh", *recorder.command
    )
    assert recorder.pid
    _await_file(f"{recorder.path}.worker")
    command = psutil.Process(recorder.pid)
    recorder.end()
    wait_until(lambda: not command.is_running(), 60.0)
    run.process.send_signal(signal.SIGTERM)
    assert run.end()[0] == 0
    assert not run.living()


def _await_file(path: str) -> None:
    wait_until(Path(path).exists, 60.0)


# --- MPS ------------------------------------------------------------------------------------


def test_mps_is_started_and_ends_after_the_daemon(
    start: Callable[..., Run], fake_mps: FakeMps, recorder: Recorder
) -> None:
    run = start("--", *recorder.command, variables=fake_mps.variables(CUDA_VISIBLE_DEVICES="3"))
    assert recorder.pid
    [daemon] = run.living_named("serve")
    pipes = {_variable(pid, "CUDA_MPS_PIPE_DIRECTORY") for pid in (daemon.pid, recorder.pid)}
    assert len(pipes) == 1
    assert str(pipes.pop()).startswith(f"{run.directory}/stormd-run-")
    assert {_variable(recorder.pid, name) for name in ("CUDA_VISIBLE_DEVICES",)} == {"3"}
    recorder.end()
    status, _, err = run.end()
    assert status == 0, err
    assert fake_mps.notes() == ["start visible=all", "quit", "end"]
    assert "MPS" not in err


def test_mps_that_runs_is_used(
    start_beside: Callable[..., Run], fake_mps: FakeMps, daemon: ChildDaemon, place: Path
) -> None:
    (place / "control").touch()
    variables = fake_mps.variables(
        CUDA_MPS_PIPE_DIRECTORY=str(place), STORMD_ADDRESS=daemon.address
    )
    run = start_beside("--mps=on", *SHOW, variables=variables)
    assert run.end()[1].split()[1:] == [str(place)]
    assert fake_mps.notes() == []


def test_a_start_of_mps_that_fails_is_told_of_once(
    start: Callable[..., Run], fake_mps: FakeMps
) -> None:
    run = start(*SHOW, variables=fake_mps.variables(FAKE_MPS_TROUBLE="no permission"))
    status, out, err = run.end()
    assert status == 0, err
    assert len(out.split()) == 1
    assert err.count("MPS") == 1
    assert (
        "stormd: without CUDA MPS: nvidia-cuda-mps-control ended with status 1: no permission; "
        "`stormd doctor` checks the driver, --mps off does without\n" in err
    )


def test_mps_is_left_alone_where_it_is_not_wanted(
    start_beside: Callable[..., Run], fake_mps: FakeMps, daemon: ChildDaemon
) -> None:
    variables = fake_mps.variables(STORMD_ADDRESS=daemon.address)
    status, out, err = start_beside("--mps=off", *SHOW, variables=variables).end()
    assert (status, out.split()) == (0, [daemon.address])
    assert fake_mps.notes() == []
    assert "MPS" not in err


def test_where_mps_is_a_must_nothing_runs_without(
    start_beside: Callable[..., Run], fake_mps: FakeMps, daemon: ChildDaemon, place: Path
) -> None:
    variables = fake_mps.variables(STORMD_ADDRESS=daemon.address)
    run = start_beside("--mps=on", "--", "touch", str(place / "ran"), variables=variables)
    status, _, err = run.end()
    assert status == 1
    assert err.startswith(
        "stormd: --mps on: the daemon that runs already must be under it too: start MPS"
    )
    assert not (place / "ran").exists()


# --- a start that is given up ---------------------------------------------------------------


def test_a_start_can_be_interrupted(
    start: Callable[..., Run], fake_mps: FakeMps, place: Path
) -> None:
    run = start("--", "touch", str(place / "ran"), variables=fake_mps.variables(FAKE_MPS_MUTE="1"))
    wait_until(lambda: fake_mps.notes() != [], 60.0)
    run.process.send_signal(signal.SIGINT)
    status, _, err = run.end()
    assert (status, err) == (128 + signal.SIGINT, "")
    assert not (place / "ran").exists()
    assert not run.living()


def _variable(pid: int, name: str) -> str | None:
    pairs = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair).get(name)
