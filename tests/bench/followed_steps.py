"""What a step that follows its plan costs the thread that trains, by what it does.

    PYTHONPATH=tests python -m bench.followed_steps --json tests/bench/results/followed_steps.json

A Llama of narrow layers on the cpu lane, with plans by which all that is saved stays, is made again
or is offloaded: tensors are so small that what remains is the client's own code. Times are those of
the thread, so what else runs on the machine does not count. What a function costs that the plan
looks at is what the forward pass takes longer than without offload, its hooks not counted.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import storm_client as storm
import torch
from bench.lane_cost import TimedHooks, spread
from storm_bench.child_daemon import ChildDaemon
from storm_client.eager import controller as planning
from storm_client.eager import recorder
from storm_client.eager.operations import REPLAYABLE
from storm_client.eager.recompute import Replayed
from storm_client.native import SWITCH, build
from storm_client.saved.versions import KeptTensor
from support.planning import FREE_REPLAYS
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from stormd.machine import describe, package_versions

WARM_UPS = 12
"""Steps in which the plan is learned, tried and timed, and each is traced for a picture."""

TOKENS = 16
VOCABULARY = 128
CASES: dict[str, dict[str, Any]] = {  # "watched": so little is made again that only looking counts
    "stays": {"budget": 1.0},
    "watched": {"budget": 0.98},
    "made again": {},
    "offloaded": {"replay": False},
}


class Passes(NamedTuple):
    """Seconds of the thread."""

    forward: float
    backward: float


class KindsOfHooks(TimedHooks):
    """Sorts what hooks take by what they return or are given."""

    def _timed(self, name: str, hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def timed(argument: Any) -> Any:
            began = time.thread_time()
            result = hook(argument)
            seconds = time.thread_time() - began
            packed = result if name == "pack" else argument
            self.seconds.setdefault(f"{name} {_kind(packed)}", []).append(seconds)
            return result

        return timed


def _kind(packed: object) -> str:
    name = type(packed).__name__  # compiled code has its own
    if isinstance(packed, KeptTensor) or name == "Kept":
        return "kept"
    return "made again" if isinstance(packed, Replayed) or name == "Recomputed" else "offloaded"


class CountingRecorder(recorder.Recorder):
    """Counts the functions that it sees, and those of the table."""

    seen = 0
    of_table = 0

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        CountingRecorder.seen += 1
        CountingRecorder.of_table += function in REPLAYABLE
        return super().__torch_function__(function, types, args, kwargs)

    @classmethod
    def count(cls, one_step: Callable[[], object]) -> tuple[int, int]:
        """Return how many functions a step's mode sees, and how many of them of the table."""
        cls.seen = cls.of_table = 0
        planning.Recorder, plain = cls, planning.Recorder
        try:
            one_step()
        finally:
            planning.Recorder = plain
        return cls.seen, cls.of_table


def model(layers: int, width: int) -> LlamaForCausalLM:
    """Return a Llama with random weights."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            vocab_size=VOCABULARY,
            use_cache=False,
        )
    )


def step(net: LlamaForCausalLM, words: Tensor, context: Any) -> Passes:
    """Compute a gradient; return what that took."""
    net.zero_grad()
    gc.collect()
    began = time.thread_time()
    with context:
        loss = net(input_ids=words, labels=words).loss
    between = time.thread_time()
    loss.backward()
    return Passes(between - began, time.thread_time() - between)


def overhead() -> float:
    """Return the seconds that a timed hook counts though it does nothing."""
    KindsOfHooks.seconds = {}
    timed = KindsOfHooks(lambda one: one, lambda one: one).pack_hook
    for _ in range(1000):
        timed(None)
    return statistics.median(KindsOfHooks.seconds.pop("pack offloaded"))


def measure(case: str, client: storm.Client, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one case."""
    net = model(options.layers, options.width)
    words = torch.randint(0, VOCABULARY, (1, TOKENS))
    offload = client.offload(net, min_bytes=1, codec="raw", **CASES[case])
    for _ in range(WARM_UPS):
        step(net, words, offload)
    functions, of_table = CountingRecorder.count(lambda: step(net, words, offload))
    KindsOfHooks.seconds.clear()
    plain, followed = [], []
    for _ in range(options.steps):
        plain.append(step(net, words, nullcontext()))
        followed.append(step(net, words, offload))
        offload.stats()  # waits for what is under way
    hooks = KindsOfHooks.seconds
    packs = sum(sum(of) for name, of in hooks.items() if name.startswith("pack"))
    more = statistics.median(
        one.forward - of.forward for one, of in zip(followed, plain, strict=True)
    )
    return {
        "case": case,
        "plain_ms": milliseconds(plain),
        "followed_ms": milliseconds(followed),
        "functions": functions,
        "functions_of_table": of_table,
        "outside_of_hooks_us": round(1e6 * (more - packs / options.steps), 1),
        "hooks_us": {
            name: spread([one - options.overhead for one in seconds])
            for name, seconds in sorted(hooks.items())
        },
    }


def milliseconds(steps: list[Passes]) -> Passes:
    """Return the medians of both passes."""
    return Passes(*(round(1e3 * statistics.median(one), 2) for one in zip(*steps, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.followed_steps")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--path", choices=("compiled", "python"), default="compiled")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.path == "python":
        os.environ[SWITCH] = "off"
    else:
        build.build()
    torch.set_num_threads(1)
    KindsOfHooks.install()
    options.overhead = overhead()
    gc.collect()
    gc.freeze()  # a collection before each step would walk over what imports have made
    planning.machine_of = lambda _: FREE_REPLAYS
    flags = ["--device=cpu", "--pool-bytes=256MiB"]
    with (
        ChildDaemon(flags=flags) as daemon,
        storm.connect(daemon.address, embedded="never", timeout=30.0) as client,
    ):
        figures = [measure(case, client, options) for case in options.only]
    for one in figures:
        print(json.dumps(one))
    if options.json:
        command = " ".join(["python -m bench.followed_steps", *sys.argv[1:]])
        versions = package_versions(("torch", "transformers", "pyzmq"))
        machine = describe() | {"command": command, "versions": versions}
        options.json.write_text(
            json.dumps({"machine": machine, "figures": figures}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
