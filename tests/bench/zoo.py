"""A step of models that people train, without offload, checkpointed and with offload.

    stormd run --mps on --pool-bytes 64GiB -- python tests/bench/zoo.py llama storm --steps 80
    stormd run --mps on --pool-bytes 64GiB -- torchrun --nproc-per-node 2 tests/bench/zoo.py \\
        ranks storm --ranks fsdp --steps 30
    stormd run -- python tests/bench/zoo.py llama storm --small       # on a CPU

With --plan, the plan's table and what steps took by the plans that were compared go to stderr.

Nothing but the public API with its defaults, on models that nobody tuned for: what a new user gets.
A row has the median of the last ten steps, AdamW included, medians of eight steps on the way there,
PyTorch's peak, and what a step offloaded and recomputed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import storm_client as storm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stormd.machine import describe, package_versions

GIB = 1 << 30
VOCABULARY = 32_000
MEASURED = 10
"""The steps at the end that count."""
WINDOW, STRIDE, FIRST = 8, 12, 4
"""Steps whose median is shown on the way, from which to which, and how many are not."""


@dataclass
class Workload:
    """A model, and how a step of it computes its loss."""

    model: nn.Module
    loss: Callable[[nn.Module], Tensor]
    autocast: torch.dtype | None = None


def llama(options: argparse.Namespace, **changes: Any) -> nn.Module:
    """Return transformers' Llama: 2048 wide, or what `changes` say."""
    transformers = import_module("transformers")
    settings = {
        "hidden_size": 64 if options.small else 2048,
        "intermediate_size": 256 if options.small else 8192,
        "num_hidden_layers": 10,
        "num_attention_heads": 4 if options.small else 16,
        "num_key_value_heads": 2 if options.small else 8,
        **changes,
    }
    return _built(options, transformers.LlamaForCausalLM, transformers.LlamaConfig, **settings)


def _built(options: argparse.Namespace, model: Any, config: Any, **settings: Any) -> nn.Module:
    with options.device:
        return model(
            config(
                vocab_size=VOCABULARY,
                max_position_embeddings=options.tokens,
                use_cache=False,
                **settings,
            )
        )


def of_tokens(
    options: argparse.Namespace,
    model: nn.Module,
    rows: int = 2,
    autocast: torch.dtype | None = None,
) -> Workload:
    """Return a causal language model that predicts random tokens."""
    shape = (rows, options.tokens)
    tokens = torch.randint(0, VOCABULARY, shape, device=options.device)
    return Workload(model, lambda it: it(input_ids=tokens, labels=tokens).loss, autocast)


def make_liger(options: argparse.Namespace) -> Workload:
    import_module("liger_kernel.transformers").apply_liger_kernel_to_llama()
    return of_tokens(options, llama(options).bfloat16())


def make_float8(options: argparse.Namespace) -> Workload:
    model: Any = llama(options).bfloat16()
    import_module("torchao.float8").convert_to_float8_training(model.model)
    return of_tokens(options, model)


def make_lora(options: argparse.Namespace) -> Workload:
    peft = import_module("peft")
    settings = peft.LoraConfig(r=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return of_tokens(options, peft.get_peft_model(llama(options).bfloat16(), settings))


def make_moe(options: argparse.Namespace) -> Workload:
    transformers = import_module("transformers")
    model = _built(
        options,
        transformers.Qwen3MoeForCausalLM,
        transformers.Qwen3MoeConfig,
        hidden_size=64 if options.small else 1024,
        intermediate_size=3072,
        moe_intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=16,
        num_experts_per_tok=4,
        output_router_logits=True,
    )
    return of_tokens(options, model.bfloat16())


def make_gpt2(options: argparse.Namespace) -> Workload:
    transformers = import_module("transformers")
    options.tokens = 64 if options.small else 1024
    with options.device:
        config = transformers.GPT2Config(
            n_embd=64 if options.small else 1024,
            n_layer=16,
            n_head=16,
            n_positions=options.tokens,
            vocab_size=VOCABULARY,
            use_cache=False,
        )
        model = transformers.GPT2LMHeadModel(config)
    return of_tokens(options, model, rows=8, autocast=torch.bfloat16)


def make_bert(options: argparse.Namespace) -> Workload:
    transformers = import_module("transformers")
    options.tokens = 64 if options.small else 512
    with options.device:
        config = transformers.BertConfig(
            hidden_size=64 if options.small else 1024,
            num_hidden_layers=16,
            num_attention_heads=16,
            intermediate_size=4096,
            vocab_size=VOCABULARY,
            max_position_embeddings=options.tokens,
        )
        model = transformers.BertForMaskedLM(config)
    return of_tokens(options, model, rows=16, autocast=torch.bfloat16)


def make_vit(options: argparse.Namespace) -> Workload:
    return of_images(options, "vit_large_patch16_224", 128)


def of_images(options: argparse.Namespace, name: str, count: int) -> Workload:
    """Return a model of timm's that classifies random images."""
    model = import_module("timm").create_model(name, num_classes=1000).to(options.device)
    images = torch.randn(count, 3, 224, 224, device=options.device)
    classes = torch.randint(0, 1000, (count,), device=options.device)
    return Workload(model, lambda it: F.cross_entropy(it(images), classes), torch.bfloat16)


def make_ranks(options: argparse.Namespace) -> Workload:
    """Return six layers in the proportions of Llama 8B, 8,192 tokens a rank."""
    options.tokens = 64 if options.small else 8192
    model = llama(
        options,
        hidden_size=256 if options.small else 4096,
        intermediate_size=896 if options.small else 14336,
        num_hidden_layers=6,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    return of_tokens(options, model.bfloat16(), rows=1)


MODELS: dict[str, Callable[[argparse.Namespace], Workload]] = {
    "llama": lambda options: of_tokens(options, llama(options).bfloat16()),
    "liger": make_liger,
    "lora": make_lora,
    "moe": make_moe,
    "fp32amp": lambda options: of_tokens(
        options, llama(options, num_hidden_layers=6), autocast=torch.bfloat16
    ),
    "float8": make_float8,
    "vit": make_vit,
    "gpt2": make_gpt2,
    "bert": make_bert,
    "convnext": lambda options: of_images(options, "convnext_base", 96),
    "ranks": make_ranks,
}


def checkpointed(name: str, model: Any) -> None:
    """Have every block checkpointed, as the model's own library does it."""
    if name in ("vit", "convnext"):  # timm's
        model.set_grad_checkpointing(True)
        return
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if name == "lora":
        model.enable_input_require_grads()


def of_ranks(mode: str, model: Any) -> nn.Module:
    """Return the model as each rank trains it."""
    if mode == "ddp":
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row of one model by one method."""
    is_on_gpu = options.device.type == "cuda"
    workload = MODELS[options.model](options)
    model = workload.model.train()
    if options.method == "checkpoint":
        checkpointed(options.model, model)
    if options.ranks:
        model = of_ranks(options.ranks, model)
    offload = None
    if options.method == "storm":
        offload = storm.offload(model, budget=options.budget)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=is_on_gpu)
    seconds = []
    for step in range(options.steps):
        if is_on_gpu and step == options.steps - MEASURED:
            torch.cuda.reset_peak_memory_stats()
        torch.manual_seed(step)
        begun = _now(is_on_gpu)
        with offload or nullcontext(), _autocast(options.device, workload.autocast):
            loss = workload.loss(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(_now(is_on_gpu) - begun)
    row = {
        "model": options.model,
        "method": options.method,
        "ms": round(1e3 * statistics.median(seconds[-MEASURED:]), 1),
        "way_ms": [
            round(1e3 * statistics.median(seconds[at : at + WINDOW]))
            for at in range(FIRST, options.steps - WINDOW, STRIDE)
        ],
        "peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 2) if is_on_gpu else None,
        "loss": loss.item(),
    }
    if offload is not None:
        stats = offload.stats()
        row["offloaded_gib"] = round(stats.offloaded_bytes / options.steps / GIB, 2)
        row["replayed_gib"] = round(stats.replayed_bytes / options.steps / GIB, 2)
        row["plan"] = planned(offload, show=options.plan)
        if options.ranks:
            row["plans_are_equal"] = are_equal(offload.plan)
    return row


def are_equal(plan: storm.Plan | None) -> bool:
    """Tell whether all ranks decide the same; each of them has to ask."""
    rows = () if plan is None else plan.rows
    decided = [(row.operation, tuple(row.shape), row.decision) for row in rows]
    digest = hashlib.sha256(repr(decided).encode()).hexdigest()
    digests: list[str | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(digests, digest)
    return len(set(digests)) == 1


def planned(offload: storm.Offload, *, show: bool) -> dict[str, Any]:
    """Return what the plan expects and what was compared; its table goes to stderr if asked."""
    plan = offload.plan
    if plan is None:
        return {}
    if show:
        print(plan, file=sys.stderr)
    return {
        "forward_ms": round(1e3 * plan.forward_seconds, 1),
        "link_ms": round(1e3 * plan.link_seconds, 1),
        "recompute_ms": round(1e3 * plan.replay_seconds, 1),
        "gib": {name: round(n / GIB, 2) for name, n in plan.bytes_by_decision.items()},
        "compared": plan.compared,
    }


def _now(is_on_gpu: bool) -> float:
    if is_on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter()


def _autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, dtype) if dtype else nullcontext()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("method", choices=["none", "checkpoint", "storm"])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--budget", default=None)
    parser.add_argument("--ranks", choices=["ddp", "fsdp"], help="under torchrun, for ranks")
    parser.add_argument("--plan", action="store_true", help="print the plan's table to stderr")
    parser.add_argument("--small", action="store_true", help="narrow and short, to try it")
    options = parser.parse_args()
    options.tokens = 64 if options.small else 4096
    options.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.ranks:
        backend = "nccl" if options.device.type == "cuda" else "gloo"
        if options.device.type == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            options.device = torch.device("cuda", torch.cuda.current_device())
        torch.distributed.init_process_group(backend)
    torch.manual_seed(0)
    row = train(options)
    machine = describe() | {"packages": package_versions(("torch", "transformers"))}
    print(json.dumps({"row": row, "machine": machine}) + "\n", end="", flush=True)  # ranks share it
    if options.ranks:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
