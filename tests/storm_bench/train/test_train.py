"""The benchmark of a training step: every method trains alike, or says why it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from storm_bench.child_daemon import ChildDaemon
from storm_bench.train.gpt import WORKLOADS, Workload, attention, make
from storm_bench.train.measure import Trial, measured
from storm_bench.train.methods import METHODS

CPU = torch.device("cpu")
SMALL = Workload(64, 2, 1, 1024, vocabulary=50, head=32)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WORKLOADS, "W0", SMALL)


def trial(method: str, address: str = "ipc:///nowhere") -> Trial:
    return Trial("W0", method, CPU, address, warm_ups=1, steps=3)


@pytest.mark.parametrize("method", ["none", "checkpoint"])
def test_methods_without_a_daemon(small: None, method: str) -> None:
    with measured(trial(method)) as figures:
        assert len(figures["steps_seconds"]) == 3
        assert figures["step_seconds"] in figures["steps_seconds"]
        assert figures["peak_bytes"] > 1 << 20
        assert "offload" not in figures


@pytest.mark.parametrize("method", ["save-on-cpu", "trl", "torchtune"])
def test_what_cannot_run_here_says_why(small: None, method: str) -> None:
    with measured(trial(method)) as figures:
        assert list(figures) == ["skipped"]
        assert "GPU" in figures["skipped"]


@pytest.mark.parametrize("method", ["storm", "storm-raw", "storm-checkpoint"])
def test_figures_of_offload_are_those_of_one_step(small: None, method: str) -> None:
    with ChildDaemon(flags=["--pool-bytes=128MiB", "--device=cpu"]) as daemon:
        with measured(trial(method, daemon.address)) as figures:
            counted = figures["offload"]
        if method == "storm-checkpoint":
            assert counted["offloaded_bytes"] == 0  # a block's input is below the least size
        else:
            softmax = SMALL.layers * SMALL.width // SMALL.head * SMALL.length**2 * 2
            assert softmax <= counted["offloaded_bytes"] < 4 * softmax
            assert counted["saved_bytes"] >= counted["offloaded_bytes"]
        assert not counted["kept"]


def test_recomputing_changes_no_gradient() -> None:
    model, tokens, targets = make(SMALL, CPU)
    gradients = []
    for recompute in (METHODS["none"].recompute, METHODS["checkpoint"].recompute):
        x = model.embed(tokens)
        with attention(CPU):
            for block in model.blocks:
                x = (
                    torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
                    if recompute
                    else block(x)
                )
            model.loss(x, targets).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        model.zero_grad(set_to_none=True)
    assert all(map(torch.equal, *gradients))


def test_a_workload_has_the_shapes_it_says() -> None:
    model, tokens, targets = make(SMALL, CPU)
    assert tokens.shape == targets.shape == (SMALL.batch, SMALL.length)
    assert len(model.blocks) == SMALL.layers
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.blocks[0].gate.weight.shape == (128, SMALL.width)  # 8/3 of 64, in 128s


def test_the_package_is_where_the_command_looks_for_it() -> None:
    import storm_bench.train as package

    assert (Path(package.__file__).parent / "__main__.py").exists()
