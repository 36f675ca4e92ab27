"""What is said of a captured step: its graph, its plan, its memory, and a picture."""

from __future__ import annotations

from pathlib import Path

import pytest
import storm_client as storm
import torch
from storm_client.errors import UsageError
from storm_client.step.compiled import CompiledStep
from support.compiled_programs import blocks
from support.steps import step_of
from support.training import seeded


def transformer(client: storm.Client, **options: object) -> CompiledStep:
    net = blocks("cpu")
    step = step_of(net, torch.optim.AdamW(net.parameters(), lr=1e-3))
    return storm.compile_step(step, client=client, codegen="eager", min_bytes=1, **options)


def test_a_step_is_explained_and_drawn(client: storm.Client, tmp_path: Path) -> None:
    step = transformer(client, budget=1.0)
    with pytest.raises(UsageError, match="before the first call"):
        step.explain()
    step(seeded("cpu", 2, 64, 32))
    found = step.explain()
    found.layout.assert_invariants(found.temporaries)
    assert found.share < 0.3
    assert found.packed_bytes <= 1.02 * found.layout.bound
    text = str(found)
    assert f"uses {found.share:.0%} of" in text
    assert "aten.mm.default" in text
    assert "1 inputs, 1 outputs" in text
    pytest.importorskip("matplotlib")
    found.draw(tmp_path / "layout.svg")
    assert (tmp_path / "layout.svg").read_text().startswith("<?xml")
    with pytest.raises(UsageError, match="cannot draw"):
        found.draw(tmp_path / "layout.nothing")
