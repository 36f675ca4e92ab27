"""The benchmark of a training step: every method trains alike, or says why it cannot."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from storm_bench.child_daemon import ChildDaemon
from storm_bench.train.gpt import Workload, attention
from storm_bench.train.llama import LlamaWorkload
from storm_bench.train.measure import Trial, measured
from storm_bench.train.methods import METHODS, _gated_mlps
from storm_bench.train.workloads import WORKLOADS, make, plain_loss
from storm_kernels.nn import GatedMLP

CPU = torch.device("cpu")
SMALL = Workload(64, 2, 1, 1024, vocabulary=50, head=32)
LLAMA = LlamaWorkload(2, 1, 128, width=64, hidden=96, heads=2, groups=1, vocabulary=50)
LORA = replace(LLAMA, rank=4)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WORKLOADS, "W0", SMALL)


def trial(method: str, address: str = "of no daemon") -> Trial:
    return Trial("W0", method, CPU, address, warm_ups=1, steps=3)


@pytest.mark.parametrize("method", ["none", "selective"])
def test_methods_without_a_daemon(small: None, method: str) -> None:
    with measured(trial(method)) as figures:
        assert len(figures["steps_seconds"]) == 3
        assert figures["step_seconds"] in figures["steps_seconds"]
        assert figures["peak_bytes"] > 1 << 20
        assert "offload" not in figures


@pytest.mark.parametrize("method", ["save-on-cpu", "trl", "gated"])
def test_what_cannot_run_here_says_why(small: None, method: str) -> None:
    with measured(trial(method)) as figures:
        assert list(figures) == ["skipped"]
        assert "GPU" in figures["skipped"] or "CUDA" in figures["skipped"]


def test_figures_of_offload_are_those_of_one_step(small: None) -> None:
    with ChildDaemon(flags=["--pool-bytes=128MiB", "--device=cpu"]) as daemon:
        for method in ("storm", "storm-checkpoint"):
            with measured(trial(method, daemon.address)) as figures:
                counted = figures["offload"]
            if method == "storm":
                softmax = SMALL.layers * SMALL.width // SMALL.head * SMALL.length**2 * 2
                assert softmax <= counted["offloaded_bytes"] < 4 * softmax
                assert counted["saved_bytes"] >= counted["offloaded_bytes"]
            else:
                assert counted["offloaded_bytes"] == 0  # a block's input is below the least size
            assert not counted["kept"]


@pytest.mark.parametrize("method", ["checkpoint", "selective"])
@pytest.mark.parametrize("work", [SMALL, LORA])
def test_recomputing_changes_no_gradient(work: Workload | LlamaWorkload, method: str) -> None:
    training = make(work, CPU)
    gradients = []
    for run in (METHODS["none"].run, METHODS[method].run):
        x = training.net.embed(training.tokens)
        with attention(CPU):
            for block in training.net.blocks:
                x = run(block, x)
            plain_loss(training.net, x, training.targets).backward()
        parameters = list(training.module.parameters())
        gradients.append([one.grad for one in parameters if one.grad is not None])
        training.module.zero_grad(set_to_none=True)
    assert gradients[0]
    assert all(map(torch.equal, *gradients))


def test_workloads_have_the_shapes_they_say_and_train(monkeypatch: pytest.MonkeyPatch) -> None:
    training = make(SMALL, CPU)
    assert training.tokens.shape == training.targets.shape == (SMALL.batch, SMALL.length)
    blocks = list(training.net.blocks)
    assert len(blocks) == SMALL.layers
    assert {parameter.dtype for parameter in training.module.parameters()} == {torch.bfloat16}
    assert blocks[0].gate.weight.shape == (128, SMALL.width)  # 8/3 of 64, in 128s
    assert len(list(make(LLAMA, CPU).net.blocks)) == LLAMA.layers
    monkeypatch.setitem(WORKLOADS, "llama", LLAMA)
    with measured(Trial("llama", "none", CPU, "", warm_ups=1, steps=2)) as figures:
        assert len(figures["steps_seconds"]) == 2


def test_adapters_alone_are_trained() -> None:
    training = make(LORA, CPU)
    trained = [name for name, one in training.module.named_parameters() if one.requires_grad]
    assert len(trained) == LORA.layers * 7 * 2
    assert all("lora_" in name for name in trained)
    assert sum(len(group["params"]) for group in training.optimizer.param_groups) == len(trained)


def test_a_workload_whose_package_is_missing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WORKLOADS, "llama", LLAMA)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with measured(Trial("llama", "none", CPU, "", warm_ups=1, steps=1)) as figures:
        assert "transformers" in figures["skipped"]


@pytest.mark.parametrize("work", [SMALL, LLAMA])
def test_gated_mlps_take_the_place_of_a_models(work: Workload | LlamaWorkload) -> None:
    training = make(work, CPU)
    x = training.net.embed(training.tokens)
    blocks = list(training.net.blocks)
    with torch.no_grad():
        expected = blocks[0](x)
        with _gated_mlps(training.module):
            made = [one for one in training.module.modules() if isinstance(one, GatedMLP)]
            assert len(made) == work.layers
            assert torch.equal(blocks[0](x), expected)
        assert not [one for one in training.module.modules() if isinstance(one, GatedMLP)]
        assert torch.equal(blocks[0](x), expected)
