"""Graphs are planned by what the daemon and the device have measured, and ranks plan alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import storm_client as storm
import torch
from storm_client.compile import device_rates, figures
from storm_client.compile.backend import compiled_of
from storm_client.compile.device_rates import rates_of
from storm_client.errors import DaemonUnavailable
from storm_client.planner.machine import CPU, CUDA, DeviceRates, TransferFigures
from storm_client.transport.daemon_loss import Supply
from support.daemon_process import DaemonProcess
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

HERE = torch.device("cpu")


@pytest.mark.parametrize("limit", [0, 1 << 24])
def test_a_graph_is_planned_for_the_link_that_the_daemon_reports(
    limit: int, make_daemon: Callable[..., DaemonProcess], tmp_path: Path
) -> None:
    settings = tmp_path / "stormd.toml"
    settings.write_text(f"link_limit_bytes = {limit}")
    daemon = make_daemon("--config", str(settings))
    with storm.connect(daemon.address, embedded="never") as client:
        net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
        compiled = storm.compile(net, client=client, codegen="eager", min_bytes=1, codec="raw")
        compiled(torch.ones(64, 64)).sum().backward()
        (graph,) = compiled_of(compiled).graphs
        seconds = graph.plan.link_seconds / graph.plan.bytes_by_decision["offload"]
        assert seconds == pytest.approx(1 / limit if limit else CPU.link, rel=0.01)


def no_daemon() -> Supply:
    raise DaemonUnavailable("none is there")


def test_without_a_daemon_a_graph_is_planned_by_the_defaults() -> None:
    assert figures.measured(CPU, HERE, no_daemon) == CPU


def test_tensors_made_while_figures_are_asked_for_are_real() -> None:
    """PyTorch compiles with fake tensors; a session on a GPU is opened by means of real ones."""
    made: list[int] = []

    def supply() -> Supply:
        made.append(torch.empty(1).data_ptr())
        return no_daemon()

    with FakeTensorMode():
        figures.measured(CPU, HERE, supply)
    assert all(made)


def test_what_is_measured_replaces_defaults_and_is_named() -> None:
    rates = DeviceRates(half_flops=1e14, single_flops=2e13, bandwidth=CUDA.bandwidth / 10)
    found = CUDA.with_rates(rates)
    assert (found.half_flops, found.single_flops, found.bandwidth) == rates
    assert found.codec == pytest.approx(10 * CUDA.codec), "it moves memory"
    assert found.measured == {"device"}
    slow = CUDA.with_transfers(TransferFigures(link=1e-9, limit=2e-9, coding=3e-11))
    assert slow.measured == {"link", "codec"}
    assert slow.link == 2e-9
    assert slow.longest_beside == pytest.approx(CUDA.longest_beside * 2e-9 / CUDA.link)
    assert slow.with_rates(rates).codec == 3e-11


# --- ranks ----------------------------------------------------------------------------------


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.distributed.Store]:
    """Have this process be several ranks, one after the other, which share a store."""
    store = torch.distributed.HashStore()
    monkeypatch.setattr(figures, "are_several", lambda: True)
    monkeypatch.setattr(figures, "own_connection", lambda: store)
    yield store
    figures._agreed.clear()


def test_ranks_plan_by_the_figures_of_the_first(ranks: torch.distributed.Store) -> None:
    first = replace(CPU, link=1.0, measured=frozenset({"link"}))
    assert figures.measured(first, HERE, no_daemon) == first
    figures._agreed.clear()
    for mine in (CPU, replace(CPU, link=3.0)):
        assert figures.measured(mine, HERE, no_daemon) == first


@pytest.mark.parametrize("text", ["nonsense", "[]", '{"link": 1.0, "unknown": 2}'])
def test_a_rank_plans_alone_if_the_store_tells_nonsense(
    text: str, ranks: torch.distributed.Store, caplog: pytest.LogCaptureFixture
) -> None:
    ranks.set("stormd/figures/cpu", text)
    assert figures.measured(CPU, HERE, no_daemon) == CPU
    assert "ranks may plan their graphs apart" in caplog.text


# --- a device's rates ------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_gpus_rates_are_its_own_and_leave_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_rates, "_rates", {})
    device = torch.device("cuda", torch.cuda.current_device())
    square = torch.ones(64, 64, device=device)
    torch.mm(square, square)  # PyTorch keeps memory for its products
    before = torch.cuda.memory_reserved(device), torch.cuda.max_memory_allocated(device)
    state = torch.cuda.get_rng_state(device)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        rates = rates_of(device)
    assert (torch.cuda.memory_reserved(device), torch.cuda.max_memory_allocated(device)) == before
    assert torch.equal(torch.cuda.get_rng_state(device), state)
    assert rates is not None
    assert rates.half_flops > rates.single_flops > 1e11
    assert rates.bandwidth > 1e10
    assert rates_of(device) is rates


def test_a_host_has_no_rates() -> None:
    assert rates_of(HERE) is None
