"""What a report shows of each layer, in a table, a notebook and a picture."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest
import storm_client as storm
import torch
from storm_client.monitoring.report import Report
from storm_client.monitoring.stats import StatsRecorder
from torch import nn

STEPS = 3


def network() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.LayerNorm(64)) for _ in range(2)]
    return nn.Sequential(*blocks)


def trained(client: storm.Client, **options: object) -> storm.Offload:
    net = network()
    offload = client.offload(net, min_bytes=4096, **options)
    for _ in range(STEPS):
        with offload:
            loss = net(torch.ones(256, 64)).square().mean()
        loss.backward()
    return offload


def test_each_layer_has_its_share(client: storm.Client) -> None:
    report = trained(client).report()
    assert list(report.layers) == ["0", "1"]
    assert report.steps == STEPS
    for stats in report.layers.values():
        assert stats.offloaded_bytes > 0
        assert stats.ratio > 1.0
    names = ("saved_bytes", "offloaded_bytes", "stored_bytes", "deduplicated_bytes")
    for name in names:
        parts = sum(getattr(stats, name) for stats in report.layers.values())
        assert 0 <= parts <= getattr(report.stats, name)
    assert report.stats.offloaded_bytes > 0
    lines = str(report).splitlines()
    assert lines[0] == "3 steps together"
    assert lines[1].split() == [
        *("layer", "saved", "duplicates", "offloaded", "recomputed", "kept", "ratio")
    ]
    assert [line.split()[0] for line in lines[2:5]] == ["0", "1", "everything"]
    assert len({len(line) for line in lines[1:5]}) == 1
    assert lines[-1].startswith("the plan of a step: keep 0 B, offload ")


def test_each_of_several_models_has_its_own_names(client: storm.Client) -> None:
    nets = [network(), network()]
    offload = client.offload(nets, min_bytes=4096, budget=1.0)
    for _ in range(STEPS):
        with offload:
            loss = nets[1](nets[0](torch.ones(256, 64))).square().mean()
        loss.backward()
    layers = offload.report().layers
    assert list(layers) == ["0:0", "0:1", "1:0", "1:1"]
    assert all(stats.skipped["budget"] > 0 for stats in layers.values())


def test_without_a_model_there_are_no_layers(client: storm.Client) -> None:
    offload, x = client.offload(min_bytes=4096), torch.ones(64, 64, requires_grad=True)
    with offload:
        loss = (x * 2).tanh().sum()
    loss.backward()
    report = offload.report()
    assert report.layers == {}
    assert "everything" in str(report)


def test_notebooks_show_tables_of_offload_statistics_and_plan(client: storm.Client) -> None:
    offload = trained(client)
    stats, plan = offload.stats(), offload.plan
    assert "<td>everything</td>" in offload._repr_html_()
    assert stats._repr_html_().count("<tr>") == len(str(stats).splitlines()) + 1
    html = plan._repr_html_()
    assert all(f"<td>{row.operation}" in html or row.operation in html for row in plan.rows)
    assert html.count("<tr>") == len(set(plan.rows)) + 1
    assert html.endswith(f"<br>{str(plan).splitlines()[-1]}</p>")


def test_an_offload_whose_budget_cannot_be_kept_is_shown_all_the_same(
    client: storm.Client,
) -> None:
    net = network()
    offload = client.offload(net, min_bytes=4096, budget=4096)
    for _ in range(2):
        with contextlib.suppress(storm.UsageError), offload:
            net(torch.ones(256, 64)).square().mean().backward()
    with pytest.raises(storm.UsageError):
        offload.plan  # noqa: B018 - raises
    assert "saved by autograd" in offload._repr_html_()


def test_before_the_first_step_there_is_nothing_to_draw(
    client: storm.Client, tmp_path: Path
) -> None:
    report = client.offload(network()).report()
    assert "no plan yet" in str(report)
    with pytest.raises(storm.UsageError, match="no step to draw yet"):
        report.draw(tmp_path / "step.svg")
    assert "<svg" not in report._repr_html_()
    assert not list(tmp_path.iterdir())


def test_a_step_is_drawn_where_matplotlib_is_there(
    client: storm.Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    report = trained(client).report()
    for name, begins in (("a.svg", b"<?xml"), ("a.png", b"\x89PNG")):
        report.draw(tmp_path / name)
        picture = (tmp_path / name).read_bytes()
        assert picture.startswith(begins)
        assert b'href="http' not in picture  # all of it is in the file
    with pytest.raises(storm.UsageError, match=r"cannot draw to .*step.nothing"):
        report.draw(tmp_path / "step.nothing")
    assert "<svg" in report._repr_html_()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    html = report._repr_html_()
    assert "<td>everything</td>" in html
    assert "<svg" not in html
    with pytest.raises(storm.UsageError, match="needs matplotlib"):
        report.draw(tmp_path / "step.svg")


def test_names_of_layers_are_escaped() -> None:
    recorder = StatsRecorder()
    recorder.of_layer("<b>").skipped(1, "budget")
    report = Report(recorder.snapshot(), recorder.layers(), 1, None, None)
    assert "<td>&lt;b&gt;</td>" in report._repr_html_()
