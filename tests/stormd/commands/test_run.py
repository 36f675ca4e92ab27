"""`stormd run`: what is asked for, and what is refused before anything is started."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

import pytest

from stormd import cli
from stormd.commands.run import add_arguments, request_of
from stormd.errors import ConfigError
from stormd.supervise.request import Request

ENVIRON = {"PATH": os.environ["PATH"], "XDG_RUNTIME_DIR": "/run/user/17"}


def _request(*arguments: str, **variables: str) -> Request:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return request_of(parser.parse_args(arguments), ENVIRON | variables)


def test_without_a_lane_on_the_gpu_mps_is_asked_for_alone() -> None:
    assert _request("--", "sh", STORMD_DEVICE="cpu").mps == "off"
    assert _request("--mps=on", "--", "sh", STORMD_DEVICE="cpu").mps == "on"


def test_a_tier_on_disk_is_passed_on() -> None:
    flags = ["--spill-path=/var/lib/stormd", "--spill-bytes=5GiB", "--spill-encrypt=off"]
    assert _request(*flags, "--", "sh").daemon_flags == (*flags, "--pool-commit=use")
    pool = _request("--pool-bytes=1GiB", "--", "sh", STORMD_POOL_COMMIT="start")
    assert (pool.daemon_flags, pool.pool_bytes) == (("--pool-bytes=1GiB",), 1 << 30)
    with pytest.raises(ConfigError, match="spill_path is set and spill_bytes is not"):
        _request(flags[0], "--", "sh")


def test_empty_variables_are_unset() -> None:
    empty = dict.fromkeys(["STORMD_POOL_BYTES", "STORMD_POOL_COMMIT", "STORMD_BUDGET"], "")
    assert _request("--", "sh", **empty) == _request("--", "sh")


@pytest.mark.parametrize("budget", ["least", "fit", "12GiB", "0.5"])
def test_a_budget_is_passed_on_as_written(budget: str) -> None:
    assert _request("--budget", budget, "--", "sh").budget == budget


@pytest.mark.parametrize(
    ("arguments", "variables", "text"),
    [
        ([], {}, "there is no command to run: stormd run -- python train.py"),
        (["--"], {}, "there is no command to run"),
        (["--budget=half", "--", "sh"], {}, "flag --budget: budget is 'half': write least, fit, a"),
        (["--", "sh"], {"STORMD_BUDGET": "2.0"}, "variable STORMD_BUDGET: budget is '2.0': write"),
        (["--pool-bytes=4GB", "--", "sh"], {}, "flag --pool-bytes: '4GB' has the unit 'GB'"),
        (["--pool-bytes=900TiB", "--", "sh"], {}, "set a smaller --pool-bytes"),
        (["--", "sh"], {"STORMD_POOLBYTES": "1"}, "did you mean 'STORMD_POOL_BYTES'?"),
    ],
)
def test_what_cannot_be_used_is_refused(
    arguments: list[str], variables: dict[str, str], text: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        _request(*arguments, **variables)


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        ([], 2, "stormd: there is no command to run"),
        (["--mps=maybe", "--", "sh"], 2, "invalid choice: 'maybe'"),
        (["--no-such-flag", "--", "sh"], 2, "unknown argument --no-such-flag"),
        (["--", "no-such-program"], 127, "stormd: there is no command 'no-such-program' on PATH"),
        (["--", "/etc/passwd"], 126, "stormd: /etc/passwd is not executable"),
    ],
)
def test_exit_statuses_of_its_own(
    arguments: list[str],
    status: int,
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    try:
        ended = cli.main(["run", *arguments])
    except SystemExit as end:
        ended = int(end.code or 0)
    assert ended == status
    assert text in capsys.readouterr().err
