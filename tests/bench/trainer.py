"""A step of transformers' Trainer with offload, beside a loop of one's own and TRL's offload.

    stormd run --pool-bytes 64GiB --mps on -- python tests/bench/trainer.py \\
        --json tests/bench/results/trainer_h200.json
    stormd run -- python tests/bench/trainer.py --layers 2 --width 256 --tokens 256   # on a CPU

Layers of Llama in the proportions of the one of 8 billion parameters are trained by AdamW, all from
one model: by a loop without offload and with, by a Trainer without offload, with `offload_trainer`,
with checkpointed layers, and with TRL's activation offloading entered where TRL's trainers enter
it. What trains and takes the time is that of `frameworks.py`.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from typing import Any

import frameworks
import torch
from framework_models import Batch, Workload, llama, rows
from recording import parser_of, record
from storm_bench.devices import device_here
from torch import nn
from transformers import Trainer, TrainingArguments

WARM_UPS = 6

METHODS = {
    "loop": "none",
    "loop, stormd": "storm",
    "Trainer": "none",
    "Trainer, stormd": "storm",
    "Trainer, gradient_checkpointing": "checkpoint",
    "Trainer, TRL": "none",
}
"""The ways to train, and what `frameworks.py` calls what is done to the model."""


class TrlTrainer(Trainer):
    """Enters TRL's context around forward and backward, as TRL's own trainers do."""

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        from trl.models.activation_offloading import get_act_offloading_ctx_manager

        if not hasattr(self, "trl_context"):
            self.trl_context = get_act_offloading_ctx_manager(model)
        with self.trl_context:
            return super().training_step(model, *args, **kwargs)


def trained(
    name: str, model: Any, data: list[Batch], options: argparse.Namespace
) -> frameworks.Trained:
    """Train a model in one of the ways."""
    options = argparse.Namespace(**vars(options) | {"framework": name, "method": METHODS[name]})
    if name.startswith("loop"):
        places = range(0, len(data), options.rows)
        batches = [
            {
                key: torch.stack([one[key] for one in data[at : at + options.rows]])
                for key in data[0]
            }
            for at in places
        ]
        on_device = [{k: one.to(options.device) for k, one in batch.items()} for batch in batches]
        workload = Workload(model, on_device)
        return frameworks.loop(options, workload, model, frameworks.offload_of(options, model))
    kind = TrlTrainer if name == "Trainer, TRL" else Trainer
    with tempfile.TemporaryDirectory() as folder:
        given = frameworks.trainer_arguments(options, folder)
        settings = TrainingArguments(
            **given | {"per_device_train_batch_size": options.rows, "max_grad_norm": 0.0}
        )
        return frameworks.fit(options, kind(model=model, args=settings, train_dataset=data))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--budget", default="least")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.set_defaults(small=False, device=torch.device(device_here()))
    options = parser.parse_args()
    options.steps += WARM_UPS
    options.offload = {"budget": options.budget}
    torch.manual_seed(0)
    model = llama(options).train()
    count = options.steps * options.rows
    data = rows(argparse.Namespace(**vars(options) | {"steps": count}))
    found: list[dict[str, Any]] = []
    for name in options.methods:
        if name == "Trainer, TRL" and options.device.type == "cpu":
            continue  # TRL has nothing to offload from
        one = trained(name, model, data, options)
        plan = [] if one.offload is None else f"{one.offload.plan}".splitlines()
        found.append({"method": name, **one.clock.row(), "plan": plan})
        del one
        model.zero_grad()
        model.gradient_checkpointing_disable()
        gc.collect()
        if options.device.type == "cuda":
            torch.cuda.empty_cache()
        print(f"{name}: {found[-1]['ms']:.1f} ms, {found[-1]['peak_gib']} GiB", flush=True)
        # after each row: what is cut off has its figures
        record(options.json, {"rows": found}, "transformers", "accelerate", "trl")


if __name__ == "__main__":
    main()
