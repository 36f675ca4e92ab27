"""Opening lanes: what was asked for, or an error; what is there, where nothing was."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest
from support import fake_cuda

from stormd.config import Config
from stormd.errors import LaneUnavailable
from stormd.lanes.opening import open_lanes
from stormd.memory.host_pool import HostPool

MIB = 1 << 20


@pytest.fixture
def pool() -> HostPool:
    return HostPool(MIB)


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the CUDA bindings impossible to import, whatever this machine has."""
    monkeypatch.setitem(sys.modules, "storm_kernels.cuda_driver", None)


@pytest.fixture
def no_cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine with a GPU and the bindings, but without CuPy."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    with fake_cuda.standing_in(monkeypatch, ("stormd.lanes.cuda.lane",)):
        driver = sys.modules["storm_kernels.cuda_driver"]
        monkeypatch.setattr(driver, "device_uuids", lambda: [fake_cuda.UUID], raising=False)
        yield


@pytest.mark.usefixtures("no_cupy")
def test_auto_does_without_a_gpu_whose_codec_cannot_be_had(
    make_config: Callable[..., Config], pool: HostPool
) -> None:
    lanes = open_lanes(make_config(device="auto"), pool, lambda _result: None)
    try:
        assert set(lanes) == {"cpu"}
    finally:
        assert all(lane.close(10) for lane in lanes.values())
    with pytest.raises(LaneUnavailable, match="CuPy is not installed"):
        open_lanes(make_config(device="cuda"), pool, lambda _result: None)
    pool.close()


@pytest.mark.parametrize("device", ["cpu", "auto"])
@pytest.mark.usefixtures("no_cuda")
def test_the_cpu_lane_is_always_there(
    make_config: Callable[..., Config], pool: HostPool, device: str
) -> None:
    config = make_config(device=device, link_limit_bytes=1 << 30)
    lanes = open_lanes(config, pool, lambda _result: None)
    assert {name: lane.device for name, lane in lanes.items()} == {"cpu": "cpu"}
    assert lanes["cpu"].speeds(1).limit == 1 << 30
    assert lanes["cpu"].close(10)
    pool.close()


@pytest.mark.usefixtures("no_cuda")
def test_a_named_device_that_is_missing_is_an_error(
    make_config: Callable[..., Config], pool: HostPool
) -> None:
    with pytest.raises(LaneUnavailable, match="CUDA is not available"):
        open_lanes(make_config(device="cuda"), pool, lambda _result: None)
    pool.close()
