"""DDP and FSDP on two processes and one daemon: each rank's losses and gradients are identical.

They need no integration: parameters come and go, and buckets and shards are filled again, under
the same `with` block as anywhere else.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support import accelerate_ranks, ranks
from support.daemon_process import DaemonProcess
from support.rank_processes import rank_processes


def run_ranks(program: ModuleType, file: Path, daemon: DaemonProcess) -> list[Any]:
    """Return what each rank of a program has found."""
    arguments = [[str(rank), str(file), daemon.address] for rank in range(ranks.RANKS)]
    found = []
    with rank_processes(program, arguments) as processes:
        for process in processes:
            out, err = process.communicate(timeout=400)
            assert process.returncode == 0, err
            found.append(json.loads(out.splitlines()[-1]))
    return found


@pytest.fixture(scope="module")
def results(daemon: DaemonProcess, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each rank found, by case; all cases run in one pair of processes."""
    return run_ranks(ranks, tmp_path_factory.mktemp("ranks") / "store", daemon)


@pytest.mark.parametrize("name", ranks.CASES)
def test_losses_and_gradients_are_identical_on_each_rank(name: str, results: list[Any]) -> None:
    for of_rank in results:
        result = of_rank[name]
        assert "error" not in result, result
        assert "differs" not in result, f"value {result['differs']}"
        assert result["offloaded_bytes"] > 0
        assert not result["kept"]
        spared = result["saved_bytes"] - result["named_saved_bytes"]
        is_recomputed = name in ("data_parallel_static", "sharded_and_recomputed")  # without names
        assert (spared == 0) if is_recomputed else (spared > 0)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in ranks.CASES
        if name.startswith("sharded") and name != "sharded_under_autocast"  # there copies are saved
    ],
)
def test_parameters_stay_though_they_come_and_go(name: str, results: list[Any]) -> None:
    """Whole ones live from a layer's forward to its end: as many stay as where all always live."""
    for of_rank in results:
        same = "data_parallel_static" if name == "sharded_and_recomputed" else "data_parallel"
        assert of_rank[name]["skipped"]["parameter"] >= of_rank[same]["skipped"]["parameter"]


@pytest.mark.parametrize("name", ["sharded", "sharded_with_parameters_on_the_host"])
def test_gradients_of_what_is_gathered_for_a_layer_do_not_stay(
    name: str, results: list[Any]
) -> None:
    """Those of the outermost module do, which keeps its parameters until the backward pass."""
    layers = ranks.LAYERS * 2 * ranks.WIDTH * 2 * ranks.WIDTH * 4
    for of_rank in results:
        assert layers <= of_rank[name]["gathered_bytes"] < 1.1 * layers
        assert of_rank[name]["parameter_bytes"] >= ranks.WIDTH * ranks.WIDTH * 4
        for other in ("data_parallel", "data_parallel_buckets", "sharded_and_kept_whole"):
            assert not of_rank[other]["gathered_bytes"]
            assert of_rank[other]["parameter_bytes"] > layers


@pytest.mark.slow
def test_layers_of_accelerates_policy_leave_from_a_sharded_model(
    daemon: DaemonProcess, tmp_path: Path
) -> None:
    for package in ("accelerate", "transformers"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    for of_rank in run_ranks(accelerate_ranks, tmp_path / "store", daemon):
        assert list(of_rank) == list(accelerate_ranks.CASES)
        for result in of_rank.values():
            assert "differs" not in result, f"value {result['differs']}"
            assert result["shards"] > 0
            assert result["offloaded_bytes"] > 0
            assert result["skipped"]["outside"] > 0
            assert not result["kept"]
        whole, recomputed = (result["offloaded_bytes"] for result in of_rank.values())
        assert recomputed < whole, "of a layer that is recomputed, only what enters it leaves"
