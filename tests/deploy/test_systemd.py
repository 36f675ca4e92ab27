"""The units as systemd itself reads them, and against what the daemon says it needs."""

from __future__ import annotations

import os
import shlex
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from stormd.config import Config
from stormd.handover import CONTROL, LIFELINES
from stormd.monitoring.health import STUCK_SECONDS
from stormd.output import EXIT_RESTART, EXIT_USAGE
from stormd.protocol import parse_address
from stormd.protocol.addresses import SYSTEM_DIRECTORY
from stormd.settings import load_config

UNITS = ("stormd.service", "nvidia-mps.service")
MAX_EXPOSURE = 3.0

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None,
    reason="systemd-analyze is missing: install the package systemd",
)


def settings(unit: Path) -> dict[str, list[str]]:
    """Return every setting's values; configparser would refuse the repeated ones."""
    found: dict[str, list[str]] = {}
    for line in unit.read_text().splitlines():
        name, separator, value = line.partition("=")
        if separator and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["systemd-analyze", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture
def installed(deploy: Path, tmp_path: Path) -> Path:
    """A root directory with the units, what they run, and the targets they hang on."""
    units = tmp_path / "etc/systemd/system"
    units.mkdir(parents=True)
    for name in UNITS:
        shutil.copy(deploy / "systemd" / name, units)
    for target in ("sysinit", "basic", "shutdown", "multi-user"):
        (units / f"{target}.target").write_text("[Unit]\nDefaultDependencies=no\n")
    programs = {
        "opt/stormd/bin/stormd",
        "usr/bin/nvidia-modprobe",
        "usr/bin/nvidia-cuda-mps-control",
        "bin/kill",
        "bin/sh",
    }
    for name in programs:
        program = tmp_path / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.touch(mode=0o755)
    return tmp_path


@needs_systemd
def test_systemd_finds_nothing_wrong(installed: Path, deploy: Path) -> None:
    for name in UNITS:
        outcome = analyze("verify", f"--root={installed}", "--man=no", name)
        assert (outcome.stdout + outcome.stderr, outcome.returncode) == ("", 0)
        threshold = f"--threshold={round(MAX_EXPOSURE * 10)}"
        unit = str(deploy / "systemd" / name)
        outcome = analyze("security", "--offline=true", "--no-pager", threshold, unit)
        assert outcome.returncode == 0, outcome.stdout
    (installed / "opt/stormd/bin/stormd").unlink()
    outcome = analyze("verify", f"--root={installed}", "--man=no", "stormd.service")
    assert "/opt/stormd/bin/stormd is not executable" in outcome.stderr


@needs_systemd
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a directory to another user")
def test_tmpfiles_makes_the_runtime_directory(deploy: Path, tmp_path: Path) -> None:
    users, groups = made_users(deploy, tmp_path)
    rules = deploy / "systemd" / "stormd.tmpfiles.conf"
    command = ["systemd-tmpfiles", "--create", f"--root={tmp_path}", str(rules)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    made = tmp_path.joinpath(*SYSTEM_DIRECTORY.parts[1:]).stat()
    assert stat.S_IMODE(made.st_mode) == 0o750
    assert (made.st_uid, made.st_gid) == (users["stormd"], groups["stormd"])


def made_users(deploy: Path, root: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Let systemd-sysusers work on an empty system; return users and groups with their ids."""
    (root / "etc").mkdir()
    rules = deploy / "systemd" / "stormd.sysusers.conf"
    command = ["systemd-sysusers", f"--root={root}", str(rules)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    return ids(root / "etc/passwd"), ids(root / "etc/group")


def ids(table: Path) -> dict[str, int]:
    rows = [line.split(":") for line in table.read_text().splitlines()]
    return {row[0]: int(row[2]) for row in rows}


def test_the_command_line_is_one_the_daemon_takes(deploy: Path) -> None:
    unit = settings(deploy / "systemd" / "stormd.service")
    program, command, *rest = shlex.split(unit["ExecStart"][0])
    assert (Path(program).name, command) == ("stormd", "serve")
    flags = dict(zip(rest[::2], rest[1::2], strict=True))
    assert flags.pop("--config") == f"/etc/{unit['ConfigurationDirectory'][0]}/stormd.toml"
    names = {flag.removeprefix("--").replace("-", "_"): value for flag, value in flags.items()}
    config = load_config(flags=names, environ={})
    assert parse_address(config.address).parent == SYSTEM_DIRECTORY
    assert config.socket_mode == 0o660


def test_restarts_timeouts_and_what_is_stored(deploy: Path) -> None:
    unit = settings(deploy / "systemd" / "stormd.service")
    assert load_config(environ=variables(unit)).resumable
    assert int(unit["FileDescriptorStoreMax"][0]) >= len((CONTROL, LIFELINES, "pool", "journal"))
    assert unit["RestartKillSignal"] == ["SIGUSR2"]
    for name in ("SuccessExitStatus", "RestartForceExitStatus"):
        assert unit[name] == [str(EXIT_RESTART)]
    assert unit["Restart"] == ["on-failure"]
    assert unit["RestartPreventExitStatus"] == [str(EXIT_USAGE)]
    assert float(unit["TimeoutStopSec"][0]) > Config().shutdown_seconds
    assert float(unit["WatchdogSec"][0]) > STUCK_SECONDS
    assert Path(f"/run/{unit['RuntimeDirectory'][0]}") == SYSTEM_DIRECTORY
    assert unit["RuntimeDirectoryMode"] == ["0750"]
    assert (unit["User"], unit["Group"]) == (["stormd"], ["stormd"])
    assert unit["Type"] == ["notify"]
    assert unit["LimitMEMLOCK"] == ["infinity"]
    mps = settings(deploy / "systemd" / "nvidia-mps.service")
    pipe = f"CUDA_MPS_PIPE_DIRECTORY=/run/{mps['RuntimeDirectory'][0]}"
    for both in (mps, unit):
        assert any(pipe in value.split() for value in both["Environment"])


def test_the_doctor_is_asked_as_the_daemons_user_about_its_address(deploy: Path) -> None:
    """As root it would refuse the directory, which is that user's."""
    unit = settings(deploy / "systemd" / "stormd.service")
    text = (deploy / "README.md").read_text("utf-8").replace("\\\n", " ")
    [line] = [line for line in text.splitlines() if "bin/stormd doctor" in line]
    words, started = shlex.split(line), shlex.split(unit["ExecStart"][0])
    assert words[words.index("--reuid") + 1] == unit["User"][0]
    for option in ("--config", "--address"):
        assert words[words.index(option) + 1] == started[started.index(option) + 1]


def test_a_drop_in_has_a_worker_for_each_gpu_instead(deploy: Path, tmp_path: Path) -> None:
    text = (deploy / "README.md").read_text("utf-8")
    drop_in = tmp_path / "drop-in"
    drop_in.write_text(text[text.index("[Service]\n") :].partition("```")[0])
    unit = settings(drop_in)
    config = load_config(environ=variables(unit))
    assert (config.resumable, config.workers) == (False, "auto")
    assert unit["RestartKillSignal"] == ["SIGTERM"]


def variables(unit: dict[str, list[str]]) -> dict[str, str]:
    """Return the daemon's settings among the variables that a unit sets."""
    words = [word for line in unit["Environment"] for word in shlex.split(line)]
    pairs = [word.split("=", 1) for word in words]
    return {name: value for name, value in pairs if name.startswith("STORMD_")}
