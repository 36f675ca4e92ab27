"""The dashboard asks only for what the daemon exposes, and its panels fit together."""

from __future__ import annotations

import json
import re
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


def test_every_metric_of_the_daemon_is_shown_and_no_other(dashboard: dict[str, Any]) -> None:
    asked = {name for text in expressions(dashboard) for name in METRIC.findall(text)}
    assert asked <= exposed()
    assert set(families()) <= {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked}


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


def test_panels_have_ids_and_titles_and_do_not_overlap(dashboard: dict[str, Any]) -> None:
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [panel["gridPos"] for panel in panels]
    cells = [
        (x, y)
        for place in places
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
    for panel in panels:
        assert panel["title"]
        assert panel["type"] == "row" or panel["description"]
