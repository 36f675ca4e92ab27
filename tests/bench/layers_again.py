"""What calling layers again takes the training thread, beside PyTorch's checkpointing; on a CPU.

    PYTHONPATH=tests python -m bench.layers_again --json tests/bench/results/layers_again.json

transformers' Llama of small layers, so that what is computed takes little: plainly, with its own
checkpointing, and within an Offload, which is told that its steps are bound by the thread, as a
GPU's would be. The methods have their steps in turns. A figure is the least time of the thread, in
milliseconds: others share the processor.
"""

from __future__ import annotations

import argparse
import json
import math
import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import thread_time
from typing import Any

import storm_client as storm
import torch
from storm_client.plan import layer_replay, planning
from storm_client.plan.layer_replay import LayerPhase
from support.called_layers import look_bound_by_the_thread

from stormd.machine import describe, package_versions

LEARNING = 40
"""Steps by which layers have been tried, and what needs no hooks has none."""


def llama(layers: int, width: int, *, is_checkpointed: bool) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
    )
    model: Any = LlamaForCausalLM(config).train()
    if is_checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model  # type: ignore[no-any-return]  # transformers is not typed


def step(
    model: torch.nn.Module, context: AbstractContextManager[object], numbers: torch.Tensor
) -> tuple[float, float]:
    """Return the thread's seconds for the forward and for the backward pass."""
    begun = thread_time()
    with context:
        loss = model(input_ids=numbers, labels=numbers).loss
    turned = thread_time()
    loss.backward()
    ended = thread_time()
    model.zero_grad(set_to_none=True)
    return turned - begun, ended - turned


def measure(client: storm.Client, options: argparse.Namespace) -> list[dict[str, Any]]:
    numbers = torch.randint(0, 256, (options.rows, options.tokens))
    made: dict[str, tuple[torch.nn.Module, AbstractContextManager[object]]] = {}
    for name in ("none", "checkpoint"):
        net = llama(options.layers, options.width, is_checkpointed=name == "checkpoint")
        made[name] = net, nullcontext()
    for budget in ("least", 0.5):
        net = llama(options.layers, options.width, is_checkpointed=False)
        offload = client.offload(net, min_bytes=1, budget=budget)
        for _ in range(LEARNING):
            step(net, offload, numbers)
        replay = offload._planning._layer_replay
        if replay.phase is not LayerPhase.ON:
            raise SystemExit(f"layers are not called again at {budget}: {replay.refusal}")
        made[f"storm, {budget}: {len(replay.replayed)} layers"] = net, offload
    least = {name: (float("inf"), float("inf")) for name in made}
    for _ in range(options.steps):
        for name, (net, context) in made.items():
            taken = step(net, context, numbers)
            least[name] = (min(least[name][0], taken[0]), min(least[name][1], taken[1]))
    rows = []
    for name, (forward, backward) in least.items():
        figures = {"forward": forward, "backward": backward, "both": forward + backward}
        row = {"method": name, **{key: round(1e3 * value, 2) for key, value in figures.items()}}
        rows.append(row)
        print(f"{name:28s} {row['forward']:7.2f} {row['backward']:7.2f} {row['both']:7.2f}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--steps", type=int, default=60, help="of each method")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    planning._look_for_host = look_bound_by_the_thread
    layer_replay.SLOWER = math.inf
    with storm.connect(embedded="always", pool_bytes=1 << 28) as client:
        rows = measure(client, options)
    if options.json is not None:
        packages = package_versions(("stormd", "torch", "transformers"))
        found = {"machine": describe(), "packages": packages, "rows": rows}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
