"""Models trained by each framework, without offload, checkpointed, and with offload.

    stormd run --mps on --pool-bytes 64GiB -- python tests/bench/frameworks.py --json FILE
    stormd run -- python tests/bench/frameworks.py --small --steps 6 --only trainer lightning

Each row is a process of its own: the framework's own loop, with its own checkpointing, with its own
way to offload where it has one, or with the one line of stormd's integration. A row has the median
of the last steps, AdamW included, PyTorch's peak, the losses of all steps, and a checksum of the
weights that were trained. Both have to be the same with offload as without, so all rows run with
PyTorch's deterministic algorithms. A framework that is not installed is a row that says so. A run
is appended to FILE, so that a few frameworks at a time can be measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib import import_module
from typing import Any, NamedTuple

import framework_models as models
import storm_client as storm
import torch
from framework_models import REENTRANT, Workload, llama, rows
from recording import machine, parser_of
from storm_bench.devices import device_here
from torch import Tensor, nn

GIB = 1 << 30
MEASURED = 10
"""The steps at the end that count, or half of them where they are few."""

METHODS = ("none", "checkpoint", "own", "storm")
PACKAGES = (
    *("torch", "transformers", "trl", "peft", "lightning", "accelerate"),
    *("liger-kernel", "torchao", "bitsandbytes", "torchtitan", "diffusers", "axolotl"),
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


class Trained(NamedTuple):
    """What came of a run."""

    clock: Clock
    model: nn.Module
    offload: storm.Offload | None = None


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


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


def run_trainer(options: argparse.Namespace) -> Trained:
    """Train with transformers' Trainer."""
    transformers = import_module("transformers")
    with tempfile.TemporaryDirectory() as folder:
        settings = transformers.TrainingArguments(**trainer_arguments(options, folder))
        return fit(
            options,
            transformers.Trainer(model=llama(options), args=settings, train_dataset=rows(options)),
        )


def run_trl(options: argparse.Namespace) -> Trained:
    """Train with TRL's SFTTrainer on tokens."""
    trl, datasets = import_module("trl"), import_module("datasets")
    data = datasets.Dataset.from_list(
        [{"input_ids": row["input_ids"].tolist()} for row in rows(options)]
    )
    with tempfile.TemporaryDirectory() as folder:
        given = trainer_arguments(options, folder)
        switch = "activation_checkpointing"  # on by default where transformers has it
        if switch in trl.SFTConfig.__dataclass_fields__:
            given[switch] = options.method == "checkpoint"
        settings = trl.SFTConfig(
            **given,
            bf16=False,
            max_length=options.tokens,
            activation_offloading=options.method == "own",
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


def fit(options: argparse.Namespace, trainer: Any) -> Trained:
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
        integration.offload_trainer(trainer, **options.offload)
        offload = trainer.storm_offload
    trainer.train()
    return Trained(clock, trainer.model, offload)


def run_lightning(options: argparse.Namespace) -> Trained:
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
        callbacks.append(integration.OffloadCallback(**options.offload))
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
    return Trained(clock, model, callbacks[0].offload if callbacks else None)


def run_accelerate(options: argparse.Namespace) -> Trained:
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
    return Trained(clock, model, offload)


def run_loop(options: argparse.Namespace) -> Trained:
    """Train in a loop of one's own, as with libraries that bring none."""
    workload: Workload = WORKLOADS[options.framework](options)
    model = prepared(options, workload.model)
    return loop(options, workload, model, offload_of(options, model))


def run_torchtitan(options: argparse.Namespace) -> Trained:
    """Train torchtitan's model with stormd's policy in the place of a checkpointing one.

    Before 0.3 torchtitan has no such policies, and the block is around its forward pass and loss.
    """
    workload = models.make_torchtitan(options)
    model = prepared(options, workload.model)
    own = import_module("torchtitan.distributed.activation_checkpoint")
    if options.method != "storm" or not hasattr(own, "ActivationCheckpointing"):
        return loop(options, workload, model, offload_of(options, model))
    policies = import_module("storm_client.integrations.torchtitan")
    policy = policies.StormOffload.Config(**options.offload).build(dump_folder="")
    policy.apply(model)
    trained = loop(options, workload, model, None)
    return trained._replace(offload=policy.offload)


def loop(
    options: argparse.Namespace,
    workload: Workload,
    model: nn.Module,
    offload: storm.Offload | None,
) -> Trained:
    clock, optimizer = Clock(options), optimizer_of(options, model)
    for batch in workload.batches:
        clock.begins()
        with offload or nullcontext():
            loss = workload.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's gap
        optimizer.step()
        optimizer.zero_grad()
        clock.ends(loss)
    return Trained(clock, model, offload)


def prepared(options: argparse.Namespace, model: Any) -> nn.Module:
    """Return the model to train, with what the method does to it."""
    if options.method == "checkpoint":
        models.checkpoint(model)
    elif options.method == "own":
        offload_as_axolotl(model)
    trained: nn.Module = model.train()
    return trained


def offload_as_axolotl(model: Any) -> None:
    """Checkpoint each layer and offload its input, as axolotl and unsloth do, by their function."""
    package = "axolotl.monkeypatch.gradient_checkpointing.offload_cpu"
    function = import_module(package).CPU_Offloaded_Gradient_Checkpointer
    models.checkpoint(model)
    for layer in model.modules():
        if hasattr(layer, "_gradient_checkpointing_func"):
            layer._gradient_checkpointing_func = lambda run, *args, **_: function.apply(run, *args)


def optimizer_of(options: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if options.framework in EIGHT_BITS:
        made: torch.optim.Optimizer = import_module("bitsandbytes").optim.AdamW8bit(
            trained, lr=1e-5
        )
        return made
    return torch.optim.AdamW(trained, lr=1e-5, fused=options.device.type == "cuda")


def offload_of(options: argparse.Namespace, model: nn.Module) -> storm.Offload | None:
    return storm.offload(model, **options.offload) if options.method == "storm" else None


WORKLOADS: dict[str, Callable[[argparse.Namespace], Workload]] = {
    "loop": models.make_llama,
    "peft": models.make_lora,
    "liger": models.make_liger,
    "torchao": models.make_float8,
    "bitsandbytes": models.make_lora,
    "qlora": models.make_qlora,
    "vision-language": models.make_vision_language,
    "whisper": models.make_whisper,
    "diffusion": models.make_diffusion,
}
"""What is trained in a loop of one's own."""

FRAMEWORKS: dict[str, Callable[[argparse.Namespace], Trained]] = {
    "trainer": run_trainer,
    "trl": run_trl,
    "lightning": run_lightning,
    "accelerate": run_accelerate,
    "torchtitan": run_torchtitan,
    **dict.fromkeys(WORKLOADS, run_loop),
}

EIGHT_BITS = ("bitsandbytes", "qlora")
"""What is trained by bitsandbytes' AdamW, with its state in eight bits."""

OWN = {"trl": "trl", "loop": "axolotl"}
"""Which frameworks' own way to offload is a row, and what it needs. It copies from a GPU."""


# --- rows ---------------------------------------------------------------------------------------


def one_row(options: argparse.Namespace) -> dict[str, Any]:
    """Return the row of one framework by one method."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    row = {"framework": options.framework, "method": options.method}
    try:
        trained = FRAMEWORKS[options.framework](options)
    except ImportError as missing:
        return row | {"missing": str(missing)}
    row |= trained.clock.row()
    row["weights"] = checksum(trained.model)
    if trained.offload is not None:
        stats = trained.offload.stats()
        for name in ("offloaded", "replayed", "kept"):
            row[f"{name}_gib"] = round(getattr(stats, f"{name}_bytes") / options.steps / GIB, 3)
    return row


def checksum(model: nn.Module) -> str:
    """Return a checksum of all weights that were trained, in their order."""
    found = 0
    for one in model.parameters():
        if one.requires_grad:
            stored = one.detach().cpu().reshape(-1).view(torch.uint8)
            found = zlib.crc32(stored.numpy(), found)
    return f"{found:08x}"


def all_rows(options: argparse.Namespace, arguments: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of all frameworks and methods, each from a process of its own."""
    on_gpu = options.device.type == "cuda"
    for framework in options.only:
        for method in options.methods:
            if method == "own" and not (on_gpu and framework in OWN):
                continue
            line = [sys.executable, __file__, *arguments, "--row", framework, method]
            done = subprocess.run(line, capture_output=True, text=True, check=False)
            if done.returncode:
                row = {"framework": framework, "method": method, "failed": done.stderr[-2000:]}
            else:
                row = json.loads(done.stdout.splitlines()[-1])
            shown = {name: value for name, value in row.items() if name != "losses"}
            print(json.dumps(shown), flush=True)
            yield row
            if row.get("missing") and method != "own":
                break


def compare(row: dict[str, Any], earlier: list[dict[str, Any]]) -> None:
    """Note in a row whether its losses and weights are those without offload."""
    for plain in earlier:
        if (plain["framework"], plain["method"]) == (row["framework"], "none") and "ms" in row:
            row["same_bits"] = all(row[name] == plain.get(name) for name in ("losses", "weights"))


def show(found: list[dict[str, Any]]) -> None:
    print(f"{'framework':<16}{'method':<12}{'ms':>9}{'GiB':>8}{'offloaded':>11}  bits")
    for row in found:
        if "ms" not in row:
            why = row.get("missing") or row["failed"].strip().splitlines()[-1]
            print(f"{row['framework']:<16}{row['method']:<12}{why[:80]}")
            continue
        peak = "-" if row["peak_gib"] is None else f"{row['peak_gib']:.2f}"
        same = {True: "the same", False: "OTHERS", None: ""}[row.get("same_bits")]
        offloaded = row.get("offloaded_gib", "")
        names = f"{row['framework']:<16}{row['method']:<12}"
        print(f"{names}{row['ms']:>9}{peak:>8}{offloaded:>11}  {same}")


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=FRAMEWORKS, default=list(FRAMEWORKS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--budget", default=None)
    parser.add_argument("--small", action="store_true", help="narrow and short, to try it")
    parser.add_argument("--row", nargs=2, metavar=("FRAMEWORK", "METHOD"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.device = torch.device(device_here())
    options.offload = {"budget": options.budget}
    if options.small:
        options.tokens = 256
        options.offload["min_bytes"] = 4096
    if options.row:
        options.framework, options.method = options.row
        print(json.dumps(one_row(options)))
        return 0
    runs = []
    if options.json and options.json.exists():
        runs = json.loads(options.json.read_text())["runs"]
    found: list[dict[str, Any]] = []
    runs.append({"machine": machine(*PACKAGES), "rows": found})
    for row in all_rows(options, sys.argv[1:]):
        compare(row, found)
        found.append(row)
        if options.json:  # at once: a run may be cut short
            options.json.write_text(json.dumps({"runs": runs}, indent=1) + "\n")
    show(found)
    return 1 if any(map(is_bad, found)) else 0


def is_bad(row: dict[str, Any]) -> bool:
    return "failed" in row or (row["method"] == "storm" and row.get("same_bits") is False)


if __name__ == "__main__":
    sys.exit(main())
