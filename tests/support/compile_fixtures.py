"""Fixtures for tests of compiled graphs: a link that is full, or none; kernels that stay."""

from __future__ import annotations

from dataclasses import replace

import pytest
from storm_client.compile import partition
from storm_client.compile.target import Target
from storm_client.planner.machine import CPU


@pytest.fixture(autouse=True)
def kernels(nothing_is_measured: None) -> None:
    """Have the same graph get the same kernels."""


@pytest.fixture
def full_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the link work beside what computes, and need longer than anything else."""
    _assume_defaults(monkeypatch)
    slow = replace(CPU, link=1e-3, codec=1e-15, graph_store=0.0, thread_recompute=0.0, hides=True)
    monkeypatch.setattr(partition, "machine_of", lambda _: slow)


@pytest.fixture
def cpu_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all devices plan as a CPU does: on a GPU a fetch of what is small begins at once."""
    _assume_defaults(monkeypatch)
    monkeypatch.setattr(partition, "machine_of", lambda _: CPU)


def _assume_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have nothing that was measured replace a test's figures."""
    monkeypatch.setattr(Target, "measured", lambda target, machine, device: machine)
