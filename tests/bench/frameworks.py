"""A Llama trained by each framework, without offload, checkpointed and with offload.

    stormd run --mps on --pool-bytes 64GiB -- python tests/bench/frameworks.py --json FILE
    stormd run -- python tests/bench/frameworks.py --small --steps 6 --only trainer lightning

Each row is a process of its own: the framework's own loop, with its own checkpointing, or with the
one line of stormd's integration. A row has the median of the last steps, AdamW included, PyTorch's
peak, and the losses of all steps, which have to be the same with offload as without. A framework
that is not installed is a row that says so.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import storm_client as storm
import torch
from torch import Tensor, nn

from stormd.machine import describe, package_versions

GIB = 1 << 30
VOCABULARY = 32_000
MEASURED = 10
"""The steps at the end that count, or half of them where they are few."""

METHODS = ("none", "checkpoint", "storm")
REENTRANT = {"use_reentrant": False}
PACKAGES = (
    *("torch", "transformers", "trl", "peft", "lightning", "accelerate"),
    *("liger-kernel", "torchao", "bitsandbytes"),
)


class Clock:
    """The time of each step, and the peak of those that count."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._counted = min(MEASURED, options.steps // 2)
        self._first = options.steps - self._counted
        self._begun = 0.0
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def begins(self) -> None:
        if torch.cuda.is_available() and len(self.seconds) == self._first:
            torch.cuda.reset_peak_memory_stats()
        self._begun = now()

    def ends(self, loss: Tensor | float) -> None:
        self.seconds.append(now() - self._begun)
        self.losses.append(float(loss))

    def row(self) -> dict[str, Any]:
        peak = torch.cuda.max_memory_allocated() / GIB if torch.cuda.is_available() else None
        return {
            "ms": round(1e3 * statistics.median(self.seconds[-self._counted :]), 1),
            "peak_gib": None if peak is None else round(peak, 2),
            "losses": self.losses,
        }


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def llama(options: argparse.Namespace) -> Any:
    """Return a Llama in bfloat16, in the proportions of 8B, or small."""
    transformers = import_module("transformers")
    wide = not options.small
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=options.width if wide else 64,
        intermediate_size=options.width * 7 // 2 if wide else 256,
        num_hidden_layers=options.layers if wide else 2,
        num_attention_heads=32 if wide else 4,
        num_key_value_heads=8 if wide else 2,
        max_position_embeddings=options.tokens,
        use_cache=False,
        pad_token_id=0,
        eos_token_id=1,
    )
    with options.device:
        model = transformers.LlamaForCausalLM(config).bfloat16()
    if options.framework in ("peft", "bitsandbytes"):
        peft = import_module("peft")
        settings = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, settings)
    return model


def rows(options: argparse.Namespace) -> list[dict[str, Tensor]]:
    """Return random tokens, a row for each step."""
    generator = torch.Generator().manual_seed(1)
    shape = (options.steps, options.tokens)
    tokens = torch.randint(2, VOCABULARY, shape, generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


# --- the frameworks -----------------------------------------------------------------------------


def trainer_arguments(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "max_steps": options.steps,
        "per_device_train_batch_size": 1,
        "learning_rate": 1e-5,
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "optim": "adamw_torch_fused" if options.device.type == "cuda" else "adamw_torch",
        "use_cpu": options.device.type == "cpu",
        "gradient_checkpointing": options.method == "checkpoint",
        "gradient_checkpointing_kwargs": REENTRANT,
    }


def run_trainer(options: argparse.Namespace) -> tuple[Clock, Any]:
    """Train with transformers' Trainer."""
    transformers = import_module("transformers")
    with tempfile.TemporaryDirectory() as folder:
        settings = transformers.TrainingArguments(**trainer_arguments(options, folder))
        return fit(
            options,
            transformers.Trainer(model=llama(options), args=settings, train_dataset=rows(options)),
        )


def run_trl(options: argparse.Namespace) -> tuple[Clock, Any]:
    """Train with TRL's SFTTrainer on tokens."""
    trl, datasets = import_module("trl"), import_module("datasets")
    data = datasets.Dataset.from_list(
        [{"input_ids": row["input_ids"].tolist()} for row in rows(options)]
    )
    with tempfile.TemporaryDirectory() as folder:
        given = trainer_arguments(options, folder)
        settings = trl.SFTConfig(
            **given,
            bf16=False,
            max_length=options.tokens,
            activation_checkpointing=options.method == "checkpoint",  # on by default
        )
        trainer = trl.SFTTrainer(
            model=llama(options),
            args=settings,
            train_dataset=data,
            processing_class=words(),
        )
        return fit(options, trainer)


def words() -> Any:
    """Return a tokenizer that nothing is asked of, for trainers that want one."""
    tokenizers, transformers = import_module("tokenizers"), import_module("transformers")
    model = import_module("tokenizers.models").WordLevel({"<pad>": 0, "<eos>": 1}, "<eos>")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(model), pad_token="<pad>", eos_token="<eos>"
    )


def fit(options: argparse.Namespace, trainer: Any) -> tuple[Clock, Any]:
    """Train by a transformers Trainer of some kind."""
    transformers = import_module("transformers")
    clock = Clock(options)

    class Times(transformers.TrainerCallback):  # type: ignore[name-defined,misc]
        def on_step_begin(self, *_: object, **__: object) -> None:
            clock.begins()

        def on_step_end(self, *_: object, **__: object) -> None:
            clock.ends(0.0)

        def on_log(self, *_: object, logs: dict[str, Any], **__: object) -> None:
            if "loss" in logs:
                clock.losses[-1] = float(logs["loss"])

    trainer.add_callback(Times())
    offload = None
    if options.method == "storm":
        integration = import_module("storm_client.integrations.transformers")
        integration.offload_trainer(trainer, budget=options.budget)
        offload = trainer.storm_offload
    trainer.train()
    return clock, offload


def run_lightning(options: argparse.Namespace) -> tuple[Clock, Any]:
    """Train with Lightning's fit."""
    lightning = import_module("lightning")
    clock = Clock(options)
    model = prepared(options, llama(options))

    class Module(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def on_train_batch_start(self, *_: object) -> None:
            clock.begins()

        def training_step(self, batch: dict[str, Tensor]) -> Tensor:
            loss: Tensor = self.model(**batch).loss
            return loss

        def on_train_batch_end(self, outputs: dict[str, Tensor], *_: object) -> None:
            clock.ends(outputs["loss"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(options, self.model)

    callbacks = []
    if options.method == "storm":
        integration = import_module("storm_client.integrations.lightning")
        callbacks.append(integration.OffloadCallback(budget=options.budget))
    trainer = lightning.Trainer(
        max_steps=options.steps,
        accelerator=options.device.type if options.device.type == "cpu" else "gpu",
        devices=1,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(rows(options), batch_size=1))
    return clock, callbacks[0].offload if callbacks else None


def run_accelerate(options: argparse.Namespace) -> tuple[Clock, Any]:
    """Train in a loop with Accelerate."""
    accelerator = import_module("accelerate").Accelerator(cpu=options.device.type == "cpu")
    accumulate = import_module("storm_client.integrations.accelerate").accumulate
    clock = Clock(options)
    model = prepared(options, llama(options))
    loader = torch.utils.data.DataLoader(rows(options), batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer_of(options, model), loader)
    offload = offload_of(options, model)
    for batch in loader:
        clock.begins()
        whole = accelerator.accumulate(model)
        if offload is not None:
            whole = accumulate(accelerator, offload, model)
        with whole:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        clock.ends(loss)
    return clock, offload


def run_loop(options: argparse.Namespace) -> tuple[Clock, Any]:
    """Train in a loop of one's own, as with libraries that bring none."""
    clock = Clock(options)
    model = prepared(options, llama(options))
    optimizer = optimizer_of(options, model)
    offload = offload_of(options, model)
    block: Callable[[], AbstractContextManager[Any]] = lambda: offload or nullcontext()  # noqa: E731
    for row in rows(options):
        clock.begins()
        batch = {name: tensor[None].to(options.device) for name, tensor in row.items()}
        with block():
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.ends(loss)
    return clock, offload


def run_liger(options: argparse.Namespace) -> tuple[Clock, Any]:
    """Train with Liger's kernels."""
    import_module("liger_kernel.transformers").apply_liger_kernel_to_llama()
    return run_loop(options)


def prepared(options: argparse.Namespace, model: Any) -> nn.Module:
    """Return the model to train, checkpointed by its own library or in float8 as asked."""
    if options.framework == "torchao":
        import_module("torchao.float8").convert_to_float8_training(
            model, module_filter_fn=lambda _, name: "lm_head" not in name
        )
    if options.method == "checkpoint":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=REENTRANT)
        if options.framework in ("peft", "bitsandbytes"):
            model.enable_input_require_grads()
    trained: nn.Module = model.train()
    return trained


def optimizer_of(options: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if options.framework == "bitsandbytes":
        made: torch.optim.Optimizer = import_module("bitsandbytes").optim.AdamW8bit(
            trained, lr=1e-5
        )
        return made
    return torch.optim.AdamW(trained, lr=1e-5, fused=options.device.type == "cuda")


def offload_of(options: argparse.Namespace, model: nn.Module) -> storm.Offload | None:
    return storm.offload(model, budget=options.budget) if options.method == "storm" else None


FRAMEWORKS: dict[str, Callable[[argparse.Namespace], tuple[Clock, Any]]] = {
    "loop": run_loop,
    "trainer": run_trainer,
    "trl": run_trl,
    "lightning": run_lightning,
    "accelerate": run_accelerate,
    "peft": run_loop,
    "liger": run_liger,
    "torchao": run_loop,
    "bitsandbytes": run_loop,
}


# --- rows ---------------------------------------------------------------------------------------


def one_row(options: argparse.Namespace) -> dict[str, Any]:
    """Return the row of one framework by one method."""
    torch.manual_seed(0)
    row = {"framework": options.framework, "method": options.method}
    try:
        clock, offload = FRAMEWORKS[options.framework](options)
    except ImportError as missing:
        return row | {"missing": str(missing)}
    row |= clock.row()
    if offload is not None:
        stats = offload.stats()
        for name in ("offloaded", "replayed", "kept"):
            row[f"{name}_gib"] = round(getattr(stats, f"{name}_bytes") / options.steps / GIB, 3)
    return row


def all_rows(options: argparse.Namespace, arguments: list[str]) -> list[dict[str, Any]]:
    """Return the rows of all frameworks and methods, each from a process of its own."""
    found: list[dict[str, Any]] = []
    for framework in options.only:
        for method in options.methods:
            line = [sys.executable, __file__, *arguments, "--row", framework, method]
            done = subprocess.run(line, capture_output=True, text=True, check=False)
            if done.returncode:
                row = {"framework": framework, "method": method, "failed": done.stderr[-2000:]}
            else:
                row = json.loads(done.stdout.splitlines()[-1])
            found.append(row)
            shown = {name: value for name, value in row.items() if name != "losses"}
            print(json.dumps(shown), flush=True)
            if row.get("missing"):
                break
    return found


def compare(found: list[dict[str, Any]]) -> None:
    """Note in each row whether its losses are those without offload."""
    plain = {row["framework"]: row.get("losses") for row in found if row["method"] == "none"}
    for row in found:
        if row["method"] == "storm" and "losses" in row:
            row["same_losses"] = row["losses"] == plain.get(row["framework"])


def show(found: list[dict[str, Any]]) -> None:
    print(f"{'framework':<14}{'method':<12}{'ms':>9}{'GiB':>8}{'offloaded':>11}  losses")
    for row in found:
        if "ms" not in row:
            why = row.get("missing") or row["failed"].strip().splitlines()[-1]
            print(f"{row['framework']:<14}{row['method']:<12}{why[:80]}")
            continue
        peak = "-" if row["peak_gib"] is None else f"{row['peak_gib']:.2f}"
        same = {True: "the same", False: "OTHERS", None: ""}[row.get("same_losses")]
        offloaded = row.get("offloaded_gib", "")
        names = f"{row['framework']:<14}{row['method']:<12}"
        print(f"{names}{row['ms']:>9}{peak:>8}{offloaded:>11}  {same}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=FRAMEWORKS, default=list(FRAMEWORKS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--budget", default=None)
    parser.add_argument("--small", action="store_true", help="narrow and short, to try it")
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--row", nargs=2, metavar=("FRAMEWORK", "METHOD"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.small:
        options.tokens = 256
    if options.row:
        options.framework, options.method = options.row
        print(json.dumps(one_row(options)))
        return 0
    found = all_rows(options, sys.argv[1:])
    compare(found)
    show(found)
    if options.json:
        machine = describe() | {"packages": package_versions(PACKAGES)}
        options.json.write_text(json.dumps({"rows": found, "machine": machine}, indent=1) + "\n")
    failed = [row for row in found if "failed" in row or row.get("same_losses") is False]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
