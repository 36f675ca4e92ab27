"""What a step costs the thread that trains, by method and pass, and what the parts of that are.

    PYTHONPATH=tests python -m bench.hook_cost --json tests/bench/results/hook_cost.json

On a GPU a narrow model is as fast as its thread. Here the zoo's models are so narrow that
arithmetic is little, and plans are what they are there: all is recomputed that can be, nothing
leaves, and compiled code follows. What the parts cost chains of two operators tell, of which all
stays, or is recomputed, or of which operators are only followed. Times are those of the thread, in
microseconds: medians of steps by all ways in turn.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import storm_client as storm
import torch
import transformers
from bench.recording import parser_of, show
from storm_bench.child_daemon import ChildDaemon
from storm_bench.zoo.methods import METHODS
from storm_bench.zoo.models import Workload
from storm_client.eager import plan_maker
from storm_client.hooks import StepHooks
from storm_client.native import build
from storm_client.native import loader as native
from storm_client.planner.alternatives import choose_alternative
from storm_client.planner.decisions import OFFLOAD, Keep
from storm_client.planner.solver import Choice
from support.planning import FREE_REPLAYS
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

WARM_UPS = 16
"""Steps in which the plan is learned."""

STEPS = 40
WIDTH, LENGTH = 64, 200
"""Of the chains whose parts are told of."""

Block = Callable[[], AbstractContextManager[Any]]


class Passes(NamedTuple):
    """What a step took; the forward pass is from before its block until behind that."""

    forward: float
    backward: float


class Chain(nn.Module):
    """Products with vectors, and their sines: nothing that takes a processor long."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH) for _ in range(length))
        self.x = torch.randn(WIDTH)

    def forward(self) -> Tensor:
        x = self.x
        for weight in self.weights:
            x = torch.sin(x * weight)
        return x.sum()


class Nothing(saved_tensors_hooks):
    """Hooks that do nothing."""

    def __init__(self) -> None:
        super().__init__(lambda tensor: tensor, lambda tensor: tensor)


class Counted(NamedTuple):
    """What became of the tensors that one step has saved, and who has followed it."""

    saves: Counter[str]
    is_compiled: bool

    @classmethod
    def of(cls, step: Callable[[], object]) -> Counted:
        """Count what a step saves."""
        hooks, end_plan, saves, walks = StepHooks.hooks, StepHooks._end_plan, Counter(), []

        def counted(self: StepHooks) -> Any:
            pack, unpack = hooks.__get__(self)

            def counting(tensor: Tensor) -> Any:
                packed = pack(tensor)
                saves[type(packed).__name__] += 1
                return packed

            return counting, unpack

        def ended(self: StepHooks) -> Any:
            walks.append(self._follower is not None and self._follower.follows_script)
            return end_plan(self)

        StepHooks.hooks, StepHooks._end_plan = property(counted), ended
        try:
            step()
        finally:
            StepHooks.hooks, StepHooks._end_plan = hooks, end_plan
        return cls(saves, all(walks))


class Way(NamedTuple):
    """A model, what computes its loss, and what surrounds that."""

    model: nn.Module
    loss: Callable[[nn.Module], Tensor]
    block: Block
    autocast: torch.dtype | None = None
    by_python: bool = False

    def step(self) -> Passes:
        """Compute gradients."""
        self.model.zero_grad()
        casts = torch.autocast("cpu", self.autocast) if self.autocast else nullcontext()
        began = time.thread_time()
        with self.block(), casts:
            loss = self.loss(self.model)
        between = time.thread_time()
        loss.backward()
        return Passes(1e6 * (between - began), 1e6 * (time.thread_time() - between))


def in_turns(ways: dict[str, Way]) -> dict[str, Passes]:
    """Return the medians of each."""
    module = native.module
    passes: dict[str, list[Passes]] = {name: [] for name in ways}
    gc.collect()
    for number in range(WARM_UPS + STEPS):
        for name, way in ways.items():
            native.module = (lambda: None) if way.by_python else module
            found = way.step()
            if number >= WARM_UPS:
                passes[name].append(found)
    native.module = module
    return {
        name: Passes(*(round(statistics.median(one), 1) for one in zip(*found, strict=True)))
        for name, found in passes.items()
    }


# --- models -----------------------------------------------------------------------------------

_NARROW: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", _NARROW | {"attention_probs_dropout_prob": 0.0}),
    "gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": 100, "n_embd": 32, "n_layer": 4, "n_head": 4, "attn_pdrop": 0.0},
    ),
    "llama": ("LlamaForCausalLM", _NARROW | {"num_key_value_heads": 2}),
    "moe": (
        "Qwen3MoeForCausalLM",
        _NARROW
        | {"num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 16, "output_router_logits": True},
    ),
    "convnext": (
        "ConvNextForImageClassification",
        {"hidden_sizes": [32, 64], "depths": [2, 2], "num_stages": 2, "image_size": 32},
    ),
}
"""The zoo's architectures, four layers each, by names of transformers' classes. A CPU has no kernel
for attention with dropout that compiled code could call again."""

_AUTOCAST = {"bert": torch.bfloat16, "gpt2": torch.bfloat16, "convnext": torch.bfloat16}


def workload(name: str) -> Workload:
    """Return a narrow model with random weights, and the loss of a short batch."""
    torch.manual_seed(0)
    made, settings = _MODELS[name]
    kind = getattr(transformers, made)
    model = kind(kind.config_class(**settings))
    if name == "convnext":
        batch = {"pixel_values": torch.randn(1, 3, 32, 32), "labels": torch.tensor([1])}
    else:
        words = torch.randint(3, 100, (1, 16))
        batch = {"input_ids": words, "labels": words}
    return Workload(model.train(), lambda trained: trained(**batch).loss, _AUTOCAST.get(name))


def checkpointed(name: str) -> Workload:
    """Return the same with every block checkpointed."""
    made = workload(name)
    if name != "convnext":
        METHODS["checkpoint"].change(made.model)
        return made
    for stage in made.model.convnext.encoder.stages:
        for number, layer in enumerate(stage.layers):
            stage.layers[number] = checkpoint_wrapper(layer)
    return made


def of_models(client: storm.Client) -> dict[str, Any]:
    """Return what both passes of a step take, and what becomes of what it saves."""
    rows: dict[str, Any] = {}
    for name in _MODELS:
        ways = {}
        for method in ("none", "nothing", "checkpoint", "storm"):
            made = checkpointed(name) if method == "checkpoint" else workload(name)
            block: Block = Nothing if method == "nothing" else nullcontext
            if method == "storm":
                offload = client.offload(made.model, min_bytes=64)
                block = lambda offload=offload: offload  # noqa: E731
            ways[method] = Way(made.model, made.loss, block, made.autocast)
        rows[name] = in_turns(ways)
        counted = Counted.of(ways["storm"].step)
        assert counted.is_compiled, f"{name}: {counted}"
        rows[name]["saves"] = counted.saves
        print(name, json.dumps(rows[name]), file=sys.stderr)
    return rows


# --- parts ------------------------------------------------------------------------------------


def of_parts(client: storm.Client) -> dict[str, Any]:
    """Return what is done for a save, an operator and a recomputed value."""
    chain = Chain(LENGTH)
    budgets: dict[str, Any] = {"stays": 1.0, "python": 1.0, "followed": 0.99, "recomputed": "least"}
    ways = {"none": Way(chain, run, nullcontext), "nothing": Way(chain, run, Nothing)}
    for name, budget in budgets.items():
        offload = client.offload(chain, min_bytes=64, budget=budget)
        block = lambda offload=offload: offload  # noqa: E731
        ways[name] = Way(chain, run, block, by_python=name == "python")
    took = in_turns(ways)
    counted = {name: Counted.of(ways[name].step) for name in budgets if name != "python"}
    assert all(one.is_compiled for one in counted.values()), counted
    saves = counted["stays"].saves.total()
    made = counted["recomputed"].saves["Recomputed"]

    def more(name: str, base: str, count: int) -> Passes:
        both = zip(took[name], took[base], strict=True)
        return Passes(*(round((one - less) / count, 2) for one, less in both))

    return {
        "passes": took,
        "saves": {name: one.saves for name, one in counted.items()},
        "a save that does nothing": more("nothing", "none", saves),
        "a save that stays": more("stays", "nothing", saves),
        "a save that Python has stay": more("python", "nothing", saves),
        "an operator that is followed": more("followed", "stays", 2 * LENGTH),
        "a value that is recomputed": more("recomputed", "nothing", made),
        "an operator called from Python": round(call_microseconds(), 2),
        "a block": round(block_microseconds(client), 1),
    }


def run(model: nn.Module) -> Tensor:
    loss: Tensor = model()
    return loss


def call_microseconds() -> float:
    """Return what the operators of a chain take with nothing recorded, the half of a link's."""
    x, weight = torch.randn(WIDTH), torch.randn(WIDTH)
    with torch.no_grad():
        return 5e5 * median_seconds(lambda: torch.sin(x * weight))


def block_microseconds(client: storm.Client) -> float:
    """Return what it takes to enter and leave a block that saves two tensors."""
    chain = Chain(1)
    offload = client.offload(chain, min_bytes=64)

    def steps(block: AbstractContextManager[Any]) -> float:
        return median_seconds(lambda: Way(chain, run, lambda: block).step())

    return 1e6 * (steps(offload) - steps(Nothing()))


def median_seconds(function: Callable[[], object]) -> float:
    """Return the thread's time for a call."""
    found = []
    for _ in range(500):
        began = time.thread_time()
        function()
        found.append(time.thread_time() - began)
    return statistics.median(found)


def nothing_leaves(*given: Any, **options: Any) -> Choice:
    """Return a choice by which what would be offloaded stays."""
    choice = choose_alternative(*given, **options)
    stays = [Keep("budget") if one == OFFLOAD else one for one in choice.decisions]
    return choice._replace(decisions=stays)


def main() -> None:
    options = parser_of(__doc__).parse_args()
    torch.set_num_threads(1)
    build.build()
    gc.disable()
    plan_maker.machine_of = lambda _: FREE_REPLAYS
    plan_maker.choose_alternative = nothing_leaves
    with (
        ChildDaemon(flags=["--device=cpu", "--pool-bytes=256MiB"]) as daemon,
        storm.connect(daemon.address, embedded="never", timeout=30.0) as client,
    ):
        figures = {
            "parts": of_parts(client),
            "models": of_models(client),
        }
    show(options.json, figures, "torch", "transformers", "pyzmq")


if __name__ == "__main__":
    main()
