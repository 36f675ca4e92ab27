"""A Trainer's losses and weights with offload are bit for bit those without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import storm_client as storm
import torch
from support import frameworks
from support.planning import mind_the_device_alone
from support.tiny_llama import tiny_llama, token_rows
from support.training import assert_identical

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed; a Trainer needs it")

from storm_client.integrations.transformers import (  # noqa: E402 - skipped before
    OffloadMixin,
    offload_trainer,
)

pytestmark = pytest.mark.usefixtures("on_each_device")

CHECKPOINTING = frameworks.checkpointing_setting(transformers.TrainingArguments)

MIN_BYTES = 4096
"""A tiny model's tensors are tiny: of a MiB, as by default, it has none."""


class RecordingTrainer(transformers.Trainer):
    """Notes each loss as it is, and not rounded or averaged as in the logs."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        found = super().compute_loss(*args, **kwargs)
        loss = found[0] if isinstance(found, tuple) else found
        self.losses = [*getattr(self, "losses", []), loss.detach().clone()]
        return found


class OwnStep(RecordingTrainer):
    """Computes no loss by `compute_loss`."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = model(**self._prepare_inputs(inputs)).loss
        self.losses = [*getattr(self, "losses", []), loss.detach().clone()]
        self.accelerator.backward(loss)
        return loss.detach()


class OffloadedTrainer(OffloadMixin, RecordingTrainer):
    pass


def fresh_llama() -> Any:
    return tiny_llama()


def make_trainer(
    folder: Path,
    *,
    model: Any = None,
    kind: Any = RecordingTrainer,
    steps: int = 4,
    more: dict[str, Any] | None = None,
    **settings: Any,
) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        use_cpu=frameworks.is_cpu(),
        report_to=[],
        disable_tqdm=True,
        **{
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "save_strategy": "no",
            **settings,
        },
    )
    rows = token_rows(16)
    given = {"model": tiny_llama() if model is None else model, **(more or {})}
    return kind(args=arguments, train_dataset=rows, eval_dataset=rows[:4], **given)


def outcome(trainer: Any) -> list[torch.Tensor]:
    return [*trainer.losses, *(p.detach() for p in trainer.model.parameters())]


def assert_same(with_offload: Any, without: Any) -> storm.OffloadStats:
    """Compare all losses and the weights they led to; return what was offloaded for them."""
    assert_identical(outcome(with_offload), outcome(without))
    stats = with_offload.storm_offload.stats()
    assert stats.offloaded_bytes > 0
    assert set(stats.kept) <= frameworks.may_keep(), stats.kept
    return stats


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        pytest.param(torch.float32, {}, id="float32"),
        pytest.param(torch.bfloat16, {}, id="bfloat16", marks=pytest.mark.slow),
        pytest.param(torch.float32, {"bf16": True}, id="autocast", marks=pytest.mark.slow),
    ],
)
def test_fifty_steps_are_identical(
    dtype: torch.dtype, settings: dict[str, Any], client: storm.Client, tmp_path: Path
) -> None:
    def make() -> Any:
        return make_trainer(tmp_path, model=tiny_llama(dtype), steps=50, **settings)

    offloaded = offload_trainer(make(), client=client, min_bytes=MIN_BYTES)
    plain = make()
    for trainer in (offloaded, plain):
        trainer.train()
    assert_same(offloaded, plain)
    assert len(plain.losses) == 50
    assert plain.losses[-1] < plain.losses[0]


def reentrant(is_reentrant: bool) -> dict[str, Any]:
    return {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": is_reentrant}}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        pytest.param(RecordingTrainer, {"gradient_accumulation_steps": 3}, id="accumulation"),
        pytest.param(
            RecordingTrainer, {"eval_strategy": "steps", "eval_steps": 2}, id="evaluation"
        ),
        pytest.param(RecordingTrainer, reentrant(False), id="checkpointing"),
        pytest.param(RecordingTrainer, reentrant(True), id="reentrant"),
        pytest.param(RecordingTrainer, {"label_smoothing_factor": 0.1}, id="label-smoothing"),
        pytest.param(RecordingTrainer, {"bf16": True}, id="autocast"),
        pytest.param(OwnStep, {}, id="a step of its own"),
    ],
)
def test_settings_of_the_trainer(
    kind: Any, settings: dict[str, Any], client: storm.Client, tmp_path: Path
) -> None:
    offloaded, plain = (make_trainer(tmp_path, kind=kind, **settings) for _ in range(2))
    assert offload_trainer(offloaded, client=client, min_bytes=MIN_BYTES) is offloaded
    for trainer in (offloaded, plain):
        trainer.train()
    assert_same(offloaded, plain)
    assert isinstance(offloaded, kind)
    assert type(offloaded).__name__ == kind.__name__
    assert type(plain) is kind


def test_a_budget(client: storm.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mind_the_device_alone(monkeypatch)  # on a GPU the thread bounds these steps: little leaves
    offloaded = offload_trainer(
        make_trainer(tmp_path, steps=8), client=client, min_bytes=MIN_BYTES, budget=0.5
    )
    plain = make_trainer(tmp_path, steps=8)
    for trainer in (offloaded, plain):
        trainer.train()
    assert_identical(outcome(offloaded), outcome(plain))
    left = [one["offload_gib"] for one in offloaded.state.log_history if "loss" in one]
    assert 0 < left[-1] < left[0], "what may stay does, once a step is planned"
    assert offloaded.storm_offload.stats().skipped["budget"] > 0


def test_lora(client: storm.Client, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)

    def make() -> Any:
        return make_trainer(tmp_path, model=peft.get_peft_model(tiny_llama(), config))

    offloaded, plain = offload_trainer(make(), client=client, min_bytes=MIN_BYTES), make()
    for trainer in (offloaded, plain):
        torch.manual_seed(1)  # of what is dropped
        trainer.train()
    assert_same(offloaded, plain)


def test_resuming_from_a_checkpoint(client: storm.Client, tmp_path: Path) -> None:
    """What was saved with offload is resumed with it, and with a class that knows nothing of it."""
    saving = {"save_strategy": "steps", "save_steps": 3}
    offload_trainer(
        make_trainer(tmp_path / "saved", steps=6, **saving), client=client, min_bytes=MIN_BYTES
    ).train()
    whole = make_trainer(tmp_path / "whole", steps=6)
    whole.train()
    for offloads in (True, False):
        resumed = make_trainer(tmp_path / "resumed", steps=6)
        if offloads:
            offload_trainer(resumed, client=client, min_bytes=MIN_BYTES)
        resumed.train(resume_from_checkpoint=str(tmp_path / "saved" / "checkpoint-3"))
        assert_identical(resumed.losses, whole.losses[3:])
        assert_identical(resumed.model.parameters(), whole.model.parameters())
        if offloads:
            logged = [one for one in resumed.state.log_history if "offload_gib" in one]
            assert [one["step"] for one in logged] == [1, 2, 3, 4, 5, 6], "the first three as saved"
            assert min(one["offload_saved_gib"] for one in logged) > 0


def test_statistics_are_in_the_logs(
    client: storm.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mind_the_device_alone(monkeypatch)  # on a GPU the thread bounds these steps: little leaves
    trainer = offload_trainer(
        make_trainer(tmp_path, logging_steps=2, gradient_accumulation_steps=2),
        client=client,
        min_bytes=MIN_BYTES,
    )
    done = trainer.train()
    stats = trainer.storm_offload.stats()
    of_two_steps = [one for one in trainer.state.log_history if "loss" in one]
    assert [one["step"] for one in of_two_steps] == [2, 4]
    for one in of_two_steps:
        assert one["offload_gib"] > 0
        assert one["offload_ratio"] > 1
    totals = {
        "offload_saved_gib": stats.saved_bytes,
        "offload_gib": stats.offloaded_bytes,
        "offload_replayed_gib": stats.replayed_bytes,
        "offload_kept_gib": stats.kept_bytes,
    }
    for name, total in totals.items():
        logged = sum(2 * one[name] for one in of_two_steps) * (1 << 30)  # means of two steps each
        assert logged == pytest.approx(total, rel=0.01, abs=8192)
    assert done.metrics["train_offload_ratio"] == pytest.approx(stats.ratio, abs=1e-5)


def test_evaluation_is_left_alone(client: storm.Client, tmp_path: Path) -> None:
    trainer = offload_trainer(make_trainer(tmp_path), client=client, min_bytes=MIN_BYTES)
    trainer.train()
    before = trainer.storm_offload.stats()
    logs = trainer.evaluate()
    assert "eval_loss" in logs
    assert not [name for name in logs if "offload" in name]
    trainer.predict(token_rows(2))
    assert trainer.storm_offload.stats() == before


def test_the_mixin(client: storm.Client, tmp_path: Path) -> None:
    options = {"offload_options": {"min_bytes": MIN_BYTES}, "offload_client": client}
    offloaded = make_trainer(tmp_path, kind=OffloadedTrainer, more=options)
    plain = make_trainer(tmp_path)
    for trainer in (offloaded, plain):
        trainer.train()
    assert_same(offloaded, plain)


def test_trained_once_more(client: storm.Client, tmp_path: Path) -> None:
    offloaded = offload_trainer(make_trainer(tmp_path), client=client, min_bytes=MIN_BYTES)
    plain = make_trainer(tmp_path)
    for trainer in (offloaded, plain, offloaded, plain):
        done = trainer.train()
        assert ("train_offload_gib" in done.metrics) == (trainer is offloaded)
    assert_same(offloaded, plain)


def test_a_model_a_trial(client: storm.Client, tmp_path: Path) -> None:
    """With `model_init` each training has a new model, whose parameters are kept on the device."""
    trainer = offload_trainer(
        make_trainer(tmp_path, more={"model": None, "model_init": fresh_llama}),
        client=client,
        min_bytes=1,
    )
    for _ in range(2):
        trainer.train()
        skipped = trainer.storm_offload.stats().skipped
        assert skipped["parameter"] > 0
        assert trainer.storm_offload._policy.modules == (trainer.model,)


def test_a_second_call_replaces_the_first(client: storm.Client, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    first = offload_trainer(trainer, client=client, min_bytes=1 << 30)
    assert offload_trainer(first, client=client, min_bytes=MIN_BYTES) is trainer
    assert type(trainer).__mro__.count(OffloadMixin) == 1
    trainer.train()
    assert trainer.storm_offload.stats().offloaded_bytes > 0


def test_no_hooks_stay_after_a_forward_that_fails(client: storm.Client, tmp_path: Path) -> None:
    trainer = offload_trainer(make_trainer(tmp_path), client=client, min_bytes=MIN_BYTES)

    def fail(*_: object) -> None:
        raise RuntimeError("no such layer")

    with (
        trainer.model.lm_head.register_forward_hook(fail),
        pytest.raises(RuntimeError, match="no such layer"),
    ):
        trainer.train()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    del trainer


def test_what_is_refused_leaves_the_trainer_as_it_was(client: storm.Client, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    for options, text in (
        ({"min_byte": 1}, "did you mean 'min_bytes'"),
        ({"min_bytes": -1}, "min_bytes is -1"),
    ):
        with pytest.raises(storm.UsageError, match=text):
            offload_trainer(trainer, client=client, **options)
    with pytest.raises(storm.UsageError, match="client is of type str"):
        offload_trainer(trainer, client="ipc:///run/stormd.sock")  # type: ignore[arg-type]
    trainer.args._n_gpu = 2
    with pytest.raises(storm.UsageError, match="torchrun --nproc-per-node 2"):
        offload_trainer(trainer, client=client)
    assert type(trainer) is RecordingTrainer
    with pytest.raises(storm.UsageError, match=r"object of type LlamaForCausalLM; pass a"):
        offload_trainer(trainer.model, client=client)
