"""TRL's trainers, with our context in the place of theirs: the same losses and weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import storm_client as storm
import torch
from storm_client.integrations.transformers import offload_trainer
from storm_client.integrations.trl import get_act_offloading_ctx_manager
from support import frameworks
from support.tiny_llama import WORDS, tiny_llama
from support.training import assert_identical

trl = pytest.importorskip("trl", reason="trl is not installed")
import datasets  # noqa: E402 - needed by trl, so there if it is
import tokenizers  # noqa: E402
import transformers  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_each_device")

CHECKPOINTING = frameworks.checkpointing_setting(transformers.TrainingArguments)

MIN_BYTES = 4096
ROWS = 8


def _tokenizer() -> Any:
    """Return one that knows the words w0, w1 and so on, and needs no files."""
    names = ["<pad>", "<bos>", "<eos>", *(f"w{number}" for number in range(3, WORDS))]
    words = {name: number for number, name in enumerate(names)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<eos>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


def _text(row: int, length: int) -> str:
    return " ".join(f"w{3 + (7 * row + 5 * place) % (WORDS - 3)}" for place in range(length))


def _settings(folder: Path, **more: Any) -> dict[str, Any]:
    settings = {
        "output_dir": str(folder),
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": frameworks.is_cpu(),
        "bf16": False,
        CHECKPOINTING: False,  # on by default in TRL: then blocks' inputs alone leave
        **more,
    }
    return {name: value for name, value in settings.items() if value is not None}


def sft(folder: Path, **more: Any) -> Any:
    rows = datasets.Dataset.from_dict({"text": [_text(row, 40) for row in range(ROWS)]})
    config = trl.SFTConfig(max_length=40, **_settings(folder, **more))
    return trl.SFTTrainer(
        model=tiny_llama(), args=config, train_dataset=rows, processing_class=_tokenizer()
    )


def _pairs() -> Any:
    return datasets.Dataset.from_dict(
        {
            "prompt": [_text(row, 8) for row in range(ROWS)],
            "chosen": [_text(row + 1, 24) for row in range(ROWS)],
            "rejected": [_text(row + 2, 20) for row in range(ROWS)],
        }
    )


def dpo(folder: Path, **more: Any) -> Any:
    return trl.DPOTrainer(
        model=tiny_llama(),
        ref_model=tiny_llama(),
        args=trl.DPOConfig(max_length=40, **_settings(folder, **more)),
        train_dataset=_pairs(),
        processing_class=_tokenizer(),
    )


def reward(folder: Path, **more: Any) -> Any:
    torch.manual_seed(0)
    config = tiny_llama().config
    config.num_labels = 1
    return trl.RewardTrainer(
        model=transformers.LlamaForSequenceClassification(config),
        args=trl.RewardConfig(max_length=40, **_settings(folder, **more)),
        train_dataset=_pairs(),
        processing_class=_tokenizer(),
    )


MAKERS: list[Callable[..., Any]] = [sft, dpo, reward]


def _outcome(trainer: Any) -> list[torch.Tensor]:
    torch.manual_seed(1)
    trainer.train()
    losses = [one["loss"] for one in trainer.state.log_history if "loss" in one]
    assert len(losses) == 3
    return [torch.tensor(losses), *(p.detach() for p in trainer.model.parameters())]


@pytest.mark.parametrize("make", MAKERS)
def test_our_context_or_the_line_for_a_trainer_in_the_place_of_theirs(
    make: Callable[..., Any], client: storm.Client, tmp_path: Path
) -> None:
    """TRL makes its own only where there is an accelerator: PyTorch's stands for it."""
    plain = _outcome(make(tmp_path))
    trainer = make(tmp_path)
    offload = get_act_offloading_ctx_manager(
        trainer.model, min_offload_size=MIN_BYTES, client=client
    )
    trainer.maybe_activation_offload_context = offload
    assert_identical(_outcome(trainer), plain)
    stats = offload.stats()
    assert stats.offloaded_bytes > 0
    assert set(stats.kept) <= frameworks.may_keep()
    trainer = make(tmp_path)
    trainer.maybe_activation_offload_context = torch.autograd.graph.save_on_cpu()
    offload_trainer(trainer, client=client, min_bytes=MIN_BYTES)
    assert isinstance(trainer.maybe_activation_offload_context, nullcontext)
    assert_identical(_outcome(trainer), plain)
    assert trainer.storm_offload.stats().offloaded_bytes > 0
    assert all("offload_ratio" in one for one in trainer.state.log_history if "loss" in one)


def test_with_the_checkpointing_that_is_their_default(client: storm.Client, tmp_path: Path) -> None:
    plain = _outcome(sft(tmp_path, **{CHECKPOINTING: None}))
    trainer = sft(tmp_path, **{CHECKPOINTING: None})
    assert getattr(trainer.args, CHECKPOINTING)
    offload = trainer.maybe_activation_offload_context = get_act_offloading_ctx_manager(
        trainer.model, min_offload_size=MIN_BYTES, client=client
    )
    assert_identical(_outcome(trainer), plain)
    assert offload.stats().offloaded_bytes > 0


def test_the_signature_begins_with_theirs() -> None:
    theirs = inspect.signature(trl.models.get_act_offloading_ctx_manager).parameters
    ours = inspect.signature(get_act_offloading_ctx_manager).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    for name, parameter in theirs.items():
        assert ours[name].kind is parameter.kind
        assert name == "min_offload_size" or ours[name].default == parameter.default


def test_wrong_options_are_refused(client: storm.Client) -> None:
    with pytest.raises(storm.UsageError, match="no option 'max_stash'"):
        get_act_offloading_ctx_manager(torch.nn.Linear(2, 2), client=client, max_stash=5)
    with pytest.raises(storm.UsageError, match="min_bytes is -1"):
        get_act_offloading_ctx_manager(torch.nn.Linear(2, 2), client=client, min_offload_size=-1)
