"""`stormd serve`: how large a pool it takes, and refusals at the start."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from storm_kernels.backends import BackendInfo
from support.cgroup import limited_memory
from support.raw_client import RawClient

from stormd import cli
from stormd.commands.serve import check_pool, fit_pool
from stormd.config import Config
from stormd.errors import ConfigError
from stormd.protocol import Refused, Welcome

SERVE = [sys.executable, "-m", "stormd.cli", "serve", "--device=cpu"]
SECONDS = 60.0
"""For what takes milliseconds, or a start, on a machine as busy as may be."""


def test_a_pool_that_grows_is_of_a_size_that_fits_where_nobody_has_chosen_one() -> None:
    grows = Config(pool_commit="use")
    assert fit_pool(grows, 16 << 30) == grows
    fit = fit_pool(grows, 3 << 30)
    assert 1 << 30 < fit.host_bytes <= 9 << 28
    for config, memory in (
        (Config(pool_commit="start"), 3 << 30),
        (Config(pool_commit="use", pool_bytes=5 << 30), 3 << 30),
        (grows, 128 << 20),
    ):
        with pytest.raises(ConfigError, match="set a smaller --pool-bytes"):
            fit_pool(config, memory)
    check_pool(Config(pool_bytes=1 << 30, cache_bytes=0), 33 << 25)
    with pytest.raises(ConfigError, match=r"1\.0 GiB.*512\.0 MiB.*--pool-bytes"):
        check_pool(Config(pool_bytes=1 << 30), 1 << 29)


def test_a_pool_that_only_just_fits_into_its_cgroup_is_refused(tmp_path: Path) -> None:
    """The kernel would end the daemon: beside the pool lie the program, page tables, a session."""
    flags = [f"--address=ipc://{tmp_path}/run/s.sock", "--cache-bytes=0", "--encode-threads=1"]
    with limited_memory(512 << 20) as cgroup:
        command = cgroup.running([*SERVE, *flags, "--pool-bytes=470MiB"])
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        assert done.returncode == 1, done
        assert "or container has" in done.stderr
        command = cgroup.running([*SERVE, *flags, "--pool-bytes=200MiB", "--log-format=json"])
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            assert any(json.loads(line)["event"] == "ready" for line in process.stderr)
            process.terminate()
            assert process.wait(SECONDS) == 0


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
def test_a_want_of_memory_or_threads_is_told_by_its_name(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], error: Exception
) -> None:
    def wanting(*_: object) -> None:
        raise error

    monkeypatch.setattr("stormd.running.run_daemon", wanting)
    monkeypatch.setattr("stormd.commands.serve.logging_process", lambda *_: nullcontext())
    assert cli.main(["serve", "--pool-bytes=1MiB"]) == 1
    assert "ulimit -v" in capfd.readouterr().err


@pytest.mark.parametrize("mib", [420, 520])
def test_under_a_limit_of_address_space_it_is_refused_or_serves(tmp_path: Path, mib: int) -> None:
    flags = [f"--address=ipc://{tmp_path}/run/s.sock", "--pool-bytes=64MiB", "--log-format=json"]
    command = ["bash", "-c", f"ulimit -v {mib << 10}; exec {shlex.join([*SERVE, *flags])}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        said: list[str] = []
        for line in process.stderr:
            said.append(line)
            if '"ready"' in line:
                with RawClient(f"ipc://{tmp_path}/run/s.sock") as client:
                    answer = client.hello()
                    assert isinstance(answer, Welcome | Refused)
                    assert isinstance(answer, Welcome) or "address space" in answer.detail
                process.terminate()
        status = process.wait(SECONDS)
    assert not any("Traceback" in line for line in said), said
    assert status == 0 if any('"ready"' in line for line in said) else status == 1, said


def test_a_missing_c_library_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    missing = BackendInfo("cpu", available=False, detail="no compiler")
    monkeypatch.setattr("storm_kernels.backends", lambda: {"cpu": missing})
    monkeypatch.setattr("stormd.running.run_daemon", lambda *_: None)
    monkeypatch.setattr("stormd.commands.serve.logging_process", lambda *_: nullcontext())
    assert cli.main(["serve", "--pool-bytes=1MiB"]) == 0
    (record,) = caplog.records
    assert "NumPy" in record.message
    assert record.reason == "no compiler"
