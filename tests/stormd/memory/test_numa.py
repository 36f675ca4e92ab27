from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from stormd import provision
from stormd.config import Config
from stormd.memory import numa
from stormd.memory.numa import NO_NODE, near_gpus, nodes_cpus, prefer_node


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bus with three GPUs: on node 0, on node 1, and one of which the kernel says nothing."""
    for number, node in enumerate((0, 1, -1)):
        (tmp_path / f"0000:{number:02x}:00.0").mkdir()
        (tmp_path / f"0000:{number:02x}:00.0" / "numa_node").write_text(f"{node}\n")
    fake = SimpleNamespace(pci_bus_id=lambda ordinal: f"0000:{ordinal:02x}:00.0")
    monkeypatch.setitem(sys.modules, "storm_kernels.cuda_driver", fake)
    return tmp_path


@pytest.mark.parametrize(
    ("ordinals", "node"),
    [((0,), 0), ((1,), 1), ((1, 1), 1), ((0, 1), NO_NODE), ((2,), NO_NODE), ((9,), NO_NODE)],
)
def test_the_node_of_gpus(devices: Path, ordinals: tuple[int, ...], node: int) -> None:
    assert near_gpus(ordinals, devices) == node


def test_no_gpu_is_near_no_node() -> None:
    assert near_gpus(()) == NO_NODE


def test_the_processors_of_a_node(tmp_path: Path) -> None:
    (tmp_path / "node1").mkdir()
    (tmp_path / "node1" / "cpulist").write_text("0-2,8,10-11\n")
    assert nodes_cpus(1, tmp_path) == {0, 1, 2, 8, 10, 11}
    assert nodes_cpus(2, tmp_path) == set()


def test_nothing_is_preferred_where_there_is_one_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "node0").mkdir()
    monkeypatch.setattr(numa, "NODES", tmp_path)
    assert prefer_node(0) == NO_NODE
    assert prefer_node(NO_NODE) == NO_NODE


def test_where_the_policy_is_refused_the_process_stays_near_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (0, 1):
        (tmp_path / f"node{number}").mkdir()
    monkeypatch.setattr(numa, "NODES", tmp_path)
    monkeypatch.setattr(numa, "SET_MEMPOLICY", {})
    before = os.sched_getaffinity(0)
    monkeypatch.setattr(numa, "nodes_cpus", lambda node: {min(before), 10_000})
    try:
        assert prefer_node(1) == 1
        assert os.sched_getaffinity(0) == {min(before)}
    finally:
        os.sched_setaffinity(0, before)
    monkeypatch.setattr(numa, "nodes_cpus", lambda node: {10_000})
    assert prefer_node(1) == NO_NODE
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_pool_is_made_near_the_gpu_that_is_served(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the thread that touches its memory."""
    chosen: list[tuple[int, int]] = []
    driver = SimpleNamespace(device_uuids=lambda: ["one"])
    monkeypatch.setitem(sys.modules, "storm_kernels.cuda_driver", driver)
    monkeypatch.setattr(provision, "near_gpus", lambda gpus: 3 if list(gpus) == [0] else NO_NODE)
    monkeypatch.setattr(
        provision, "prefer_node", lambda node: chosen.append((node, threading.get_ident()))
    )
    config = Config(device=device)
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(provision.near_gpu, config, threading.get_ident).result()
    assert chosen == [(3 if device == "cuda" else NO_NODE, made)]
