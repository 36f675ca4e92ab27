"""Whether MPS runs, and what it lacks where it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.fake_mps import FakeMps

from stormd.errors import MpsUnavailable
from stormd.supervise import mps


@pytest.fixture
def fake(tmp_path: Path) -> FakeMps:
    return FakeMps(tmp_path)


def test_it_runs_where_its_control_daemon_answers(fake: FakeMps, tmp_path: Path) -> None:
    environ = fake.variables(CUDA_MPS_PIPE_DIRECTORY=str(tmp_path))
    assert not mps.answers(environ)
    (tmp_path / "control").touch()
    assert mps.answers(environ)
    fake.install("nvidia-cuda-mps-control", "#!/bin/sh\nexit 1\n")
    assert not mps.answers(environ), "nobody reads the pipes"
    fake.remove("nvidia-cuda-mps-control")
    assert mps.answers(environ), "pipes without the program are a host's"


def test_what_is_lacking_is_told_with_the_next_step(fake: FakeMps) -> None:
    mps.check_available(fake.variables(), daemon_runs=False)
    fake.remove("nvidia-smi")
    with pytest.raises(MpsUnavailable, match="there is no nvidia-smi: on a machine"):
        mps.check_available(fake.variables(), daemon_runs=False)


@pytest.mark.parametrize("visible", ["", "-1"])
def test_hidden_gpus_are_none(fake: FakeMps, visible: str) -> None:
    with pytest.raises(MpsUnavailable, match=f"CUDA_VISIBLE_DEVICES is '{visible}'"):
        mps.check_available(fake.variables(CUDA_VISIBLE_DEVICES=visible), daemon_runs=False)


@pytest.mark.parametrize(
    "script", ["#!/bin/sh\necho No devices were found\n", "#!/bin/sh\nexit 9\n", "no program\n"]
)
def test_a_driver_without_a_gpu(fake: FakeMps, script: str) -> None:
    fake.install("nvidia-smi", script)
    with pytest.raises(MpsUnavailable, match="nvidia-smi lists no GPU: on a machine"):
        mps.check_available(fake.variables(), daemon_runs=False)


def test_its_directories_are_the_user_s_alone(tmp_path: Path) -> None:
    made = mps.mps_environment(tmp_path)
    assert {Path(path).stat().st_mode & 0o777 for path in made.values()} == {0o700}
    assert set(made) == {"CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"}
