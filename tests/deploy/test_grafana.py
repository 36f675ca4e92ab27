"""The dashboard asks only for what the daemon exposes, and its panels fit together."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, ProcessCollector
from support.exposition import families

METRIC = re.compile(r"\b(?:stormd|process)_\w+")
PARTS = {"_bucket", "_sum", "_count"}
TARGET_LABELS = {"instance", "job", "le"}


@pytest.fixture
def dashboard(deploy: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((deploy / "grafana" / "stormd.json").read_text())
    return loaded


def exposed() -> set[str]:
    """Return every name of a sample that a scrape may hold."""
    names = {name for name, metric in families().items() if metric.type != "histogram"}
    for name, metric in families().items():
        if metric.type == "histogram":
            names |= {name + part for part in PARTS}
    for metric in ProcessCollector(registry=CollectorRegistry()).collect():
        names |= {sample.name for sample in metric.samples}
    return names


def expressions(dashboard: dict[str, Any]) -> list[str]:
    found = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    return found + [
        variable["definition"]
        for variable in dashboard["templating"]["list"]
        if variable["type"] == "query"
    ]


def test_every_metric_asked_for_is_exposed(dashboard: dict[str, Any]) -> None:
    known = exposed()
    asked = {name for text in expressions(dashboard) for name in METRIC.findall(text)}
    assert asked <= known
    assert len(asked) > 10


def test_every_metric_of_the_daemon_is_shown(dashboard: dict[str, Any]) -> None:
    asked = {name for text in expressions(dashboard) for name in METRIC.findall(text)}
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked}
    assert set(families()) <= shown


def test_every_label_is_one_of_its_metrics(dashboard: dict[str, Any]) -> None:
    known = families()
    for text in expressions(dashboard):
        names = [re.sub(r"_(bucket|sum|count)$", "", name) for name in METRIC.findall(text)]
        samples = [one for name in names if name in known for one in known[name].samples]
        allowed = TARGET_LABELS.union(*(sample.labels for sample in samples))
        grouped = [part.split(",") for part in re.findall(r"by \(([^)]*)\)", text)]
        used = {label.strip() for labels in grouped for label in labels}
        used |= set(re.findall(r"(\w+)=~?\"", text))
        assert used <= allowed, text


def test_panels_have_ids_of_their_own_and_do_not_overlap(dashboard: dict[str, Any]) -> None:
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for one, other in combinations((panel["gridPos"] for panel in panels), 2):
        apart = (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )
        assert apart, (one, other)
        assert max(one["x"] + one["w"], other["x"] + other["w"]) <= 24


def test_every_panel_says_what_it_shows(dashboard: dict[str, Any]) -> None:
    for panel in dashboard["panels"]:
        assert panel["title"]
        assert panel["type"] == "row" or panel["description"]
