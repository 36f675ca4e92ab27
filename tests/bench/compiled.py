"""What offload inside compiled graphs costs, beside what PyTorch offers, at the same time.

    python tests/bench/compiled.py --json tests/bench/results/compiled_h200.json
    python tests/bench/compiled.py --model llama --rows 1 --tokens 32768 --blocks
    python tests/bench/compiled.py --layers 2 --width 128 --tokens 256 --steps 3     # on a CPU

A model of equal blocks is compiled as a whole, or block by block with --blocks, and trained by each
method in turn: nothing, checkpointing of every block, PyTorch's activation_memory_budget, and the
backend at several budgets. The model is a bare decoder, or transformers' Llama with its embedding,
head and loss, in the proportions of the one of 8 billion parameters. A row has the median of the
steps' times and the most memory; on a CPU that is the most bytes of saved tensors that the plan
leaves. Beside it stands what the plans expect. Losses are compared to the bit. On a GPU Inductor
measures which configuration of a reduction is fastest, and another adds in another order:
--deterministic has it choose without measuring, and no kernel of PyTorch's add in any order.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

import storm_client as storm
import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from stormd.machine import describe, package_versions
from stormd.protocol import budget_text, parse_budget

GIB = 1 << 30
WARM_UPS = 3
BUDGETS = (0.0, 0.25, 0.5, 0.75, 1.0)
MEMORY_BUDGETS = (0.6, 0.4, 0.2)


class Row(NamedTuple):
    """What was measured of one method."""

    method: str
    milliseconds: float
    peak_gib: float
    compile_seconds: float
    same_losses: bool
    expected: dict[str, float]
    """Of the backend's plans, all graphs together: milliseconds, and GiB of saved tensors."""


class Block(nn.Module):
    """RMSNorm, causal attention, a gated MLP, as Llama has them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 128)
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, 7 * width // 2, bias=False)
        self.up = nn.Linear(width, 7 * width // 2, bias=False)
        self.down = nn.Linear(7 * width // 2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(w, dim=-1)
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, w))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """Blocks, each of which may be checkpointed."""

    def __init__(self, layers: int, width: int, *, is_checkpointed: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.is_checkpointed = is_checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return x


class Llama(nn.Module):
    """Transformers' Llama, each block of which may be checkpointed; called with token numbers."""

    HEAD_WIDTH, QUERIES_A_KEY, VOCABULARY = 128, 4, 32_000

    def __init__(self, layers: int, width: int, *, is_checkpointed: bool) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM  # not for the decoder

        heads = max(1, width // self.HEAD_WIDTH)
        config = LlamaConfig(
            vocab_size=self.VOCABULARY,
            hidden_size=width,
            intermediate_size=7 * width // 2,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=max(1, heads // self.QUERIES_A_KEY),
            max_position_embeddings=1 << 17,
            use_cache=False,
        )
        self.llama = LlamaForCausalLM(config)
        if is_checkpointed:
            self.llama.gradient_checkpointing_enable({"use_reentrant": False})

    def forward(self, numbers: Tensor) -> Tensor:
        loss: Tensor = self.llama(input_ids=numbers, labels=numbers).loss
        return loss


def blocks_of(model: nn.Module) -> nn.ModuleList:
    found = model.llama.model.layers if isinstance(model, Llama) else model.blocks
    assert isinstance(found, nn.ModuleList)
    return found


def made_input(arguments: argparse.Namespace) -> Tensor:
    shape = arguments.rows, arguments.tokens
    if arguments.model == "llama":
        return torch.randint(Llama.VOCABULARY, shape, device=arguments.device)
    x = torch.randn(*shape, arguments.width, device=arguments.device)
    return x.to(torch.bfloat16)


Wrap = Callable[[nn.Module], nn.Module]


class Method(NamedTuple):
    """How a model is compiled, and in which context."""

    name: str
    wrap: Wrap
    context: AbstractContextManager[object] = nullcontext()
    is_checkpointed: bool = False


def methods(arguments: argparse.Namespace) -> list[Method]:
    plain = torch.compile
    found = [Method("none", plain), Method("checkpoint", plain, is_checkpointed=True)]
    for budget in arguments.memory_budgets:
        patch = functorch_config.patch(activation_memory_budget=budget)
        found.append(Method(f"activation_memory_budget={budget:g}", plain, patch))
    for budget in arguments.budgets:

        def wrap(model: nn.Module, budget: str | float = budget) -> nn.Module:
            return storm.compile(model, budget=budget, min_bytes=arguments.min_bytes)

        found.append(Method(f"stormd budget={budget_text(budget)}", wrap))
    return [*found, Method("none, again", plain)]


def measure(
    method: Method, arguments: argparse.Namespace, expected: list[float]
) -> tuple[Row, list[float]]:
    """Train by one method; `expected` are the losses of the first."""
    torch._dynamo.reset()
    gc.collect()
    torch.manual_seed(0)
    device = arguments.device
    kind = Llama if arguments.model == "llama" else Decoder
    with torch.device(device):  # random weights take a processor minutes
        model: nn.Module = kind(
            arguments.layers, arguments.width, is_checkpointed=method.is_checkpointed
        )
    model = model.to(device, torch.bfloat16).train()
    compiled: list[nn.Module] = []
    if arguments.blocks:
        blocks = blocks_of(model)
        compiled = [method.wrap(block) for block in blocks]
        for place, block in enumerate(compiled):
            blocks[place] = block
        call = model
    else:
        compiled = [call := method.wrap(model)]
    # Fused: the temporaries of another would hide what a method saves.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    x = made_input(arguments)
    losses, seconds = [], []
    with method.context:
        for step in range(WARM_UPS + arguments.steps):
            if step == WARM_UPS and device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            _synchronize(device)
            began = time.perf_counter()
            found = call(x)
            loss = found if found.dim() == 0 else found.float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            _synchronize(device)
            seconds.append(time.perf_counter() - began)
            losses.append(loss.item())
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else _planned(method, compiled)
    row = Row(
        method.name,
        1e3 * statistics.median(seconds[WARM_UPS:]),
        peak / GIB,
        seconds[0],
        not expected or losses == expected,
        _expected(method, compiled),
    )
    return row, losses


def _planned(method: Method, compiled: list[nn.Module]) -> int:
    """Return the peak of saved bytes by plan, 0 for what has none."""
    if not method.name.startswith("stormd"):
        return 0
    return sum(plan.peak_bytes for one in compiled for plan in storm.compiled_plans(one))


def _expected(method: Method, compiled: list[nn.Module]) -> dict[str, float]:
    if not method.name.startswith("stormd"):
        return {}
    plans = [plan for one in compiled for plan in storm.compiled_plans(one)]
    kinds = ("forward", "link", "replay", "stall")
    found = {
        f"{kind}_ms": 1e3 * sum(getattr(p, f"{kind}_seconds") for p in plans) for kind in kinds
    }
    return {**found, "peak_gib": sum(plan.peak_bytes for plan in plans) / GIB}


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", choices=("decoder", "llama"), default="decoder")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--min-bytes", type=int, default=1 << 20)
    parser.add_argument(
        "--deterministic", action="store_true", help="have equal graphs give equal bits"
    )
    parser.add_argument("--blocks", action="store_true", help="compile block by block")
    parser.add_argument(
        "--budgets",
        nargs="*",
        type=parse_budget,
        default=BUDGETS,
        help="of the backend: 0.5, 4GiB for all blocks together, least",
    )
    parser.add_argument(
        "--memory-budgets", nargs="*", type=float, default=MEMORY_BUDGETS, help="of PyTorch's own"
    )
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    if arguments.deterministic:
        torch.use_deterministic_algorithms(mode=True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        inductor_config.deterministic = True
    rows: list[Row] = []
    expected: list[float] = []
    print(f"{'method':<32} {'ms':>9} {'peak GiB':>9} {'first s':>8}  losses")
    for method in methods(arguments):
        row, losses = measure(method, arguments, expected)
        expected = expected or losses
        rows.append(row)
        same = "the same" if row.same_losses else "OTHERS"
        print(
            f"{row.method:<32} {row.milliseconds:>9.1f} {row.peak_gib:>9.3f} "
            f"{row.compile_seconds:>8.1f}  {same}",
            flush=True,
        )
        if arguments.json:  # after each row: what is cut off has its figures
            write(arguments, rows)


def write(arguments: argparse.Namespace, rows: list[Row]) -> None:
    figures = {
        "machine": describe(),
        "packages": package_versions(),
        "arguments": {k: str(v) for k, v in vars(arguments).items() if k != "json"},
        "rows": [row._asdict() for row in rows],
    }
    arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
