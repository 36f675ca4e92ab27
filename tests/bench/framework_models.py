"""The models that `frameworks.py` trains, from configurations, with random weights and batches.

Nothing is downloaded. Each has a width that people train on one GPU, or is small, to try it out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

VOCABULARY = 32_000
REENTRANT = {"use_reentrant": False}

Batch = dict[str, Tensor]


class Workload(NamedTuple):
    """A model, a batch for each step, and how the loss of one is computed."""

    model: Any
    batches: list[Batch]
    loss: Callable[[Any, Batch], Tensor] = lambda model, batch: model(**batch).loss


def llama(options: argparse.Namespace) -> Any:
    """Return a Llama in bfloat16, in the proportions of 8B, or small."""
    transformers = import_module("transformers")
    wide = not options.small
    heads = max(1, options.width // 128)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=options.width if wide else 64,
        intermediate_size=options.width * 7 // 2 if wide else 256,
        num_hidden_layers=options.layers if wide else 2,
        num_attention_heads=heads if wide else 4,
        num_key_value_heads=max(1, heads // 4) if wide else 2,
        max_position_embeddings=options.tokens,
        use_cache=False,
        pad_token_id=0,
        eos_token_id=1,
    )
    with options.device:
        return transformers.LlamaForCausalLM(config).bfloat16()


def rows(options: argparse.Namespace) -> list[Batch]:
    """Return random tokens, int64 [tokens] for each step, as data sets have them."""
    return [{"input_ids": row, "labels": row} for row in _tokens(options, options.tokens)]


def _tokens(options: argparse.Namespace, *shape: int, first: int = 2) -> list[Tensor]:
    """Return random tokens of a shape for each step, on the host."""
    generator = torch.Generator().manual_seed(1)
    vocabulary = 500 if options.small and first > 2 else VOCABULARY
    return list(torch.randint(first, vocabulary, (options.steps, *shape), generator=generator))


def _on(device: torch.device, batches: list[Batch]) -> list[Batch]:
    return [{name: one.to(device) for name, one in batch.items()} for batch in batches]


def make_llama(options: argparse.Namespace) -> Workload:
    batches = [{name: row[None] for name, row in batch.items()} for batch in rows(options)]
    return Workload(llama(options), _on(options.device, batches))


def make_lora(options: argparse.Namespace) -> Workload:
    """Return the same with LoRA of rank 16 in all its projections."""
    peft, workload = import_module("peft"), make_llama(options)
    settings = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    return workload._replace(model=peft.get_peft_model(workload.model, settings))


def make_liger(options: argparse.Namespace) -> Workload:
    import_module("liger_kernel.transformers").apply_liger_kernel_to_llama()
    return make_llama(options)


def make_float8(options: argparse.Namespace) -> Workload:
    """Return the same with its products in float8, but for the head's."""
    float8, workload = import_module("torchao.float8"), make_llama(options)
    float8.convert_to_float8_training(
        workload.model, module_filter_fn=lambda _, name: "lm_head" not in name
    )
    return workload


def make_vision_language(options: argparse.Namespace) -> Workload:
    """Return Qwen2-VL 2048 wide: an image of 4,096 patches before the text, which are 4,096 tokens.

    Four patches are a token. Positions of image and text are the model's own.
    """
    transformers = import_module("transformers")
    small = options.small
    side, length = (8, 64) if small else (64, 4096)
    heads = 4 if small else 16
    text = {
        "vocab_size": 500 if small else VOCABULARY,
        "hidden_size": 64 if small else 2048,
        "intermediate_size": 128 if small else 8192,
        "num_hidden_layers": 2 if small else 10,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "max_position_embeddings": 8192,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [2, 3, 3] if small else [16, 24, 24],
        },
        "use_cache": False,
        "bos_token_id": 1,
        "eos_token_id": 1,
    }
    image = {
        "depth": 2 if small else 16,
        "embed_dim": 64 if small else 1280,
        "hidden_size": text["hidden_size"],
        "num_heads": heads,
    }
    begin, end, pictured = 2, 3, 4
    config = transformers.Qwen2VLConfig(
        text_config=text,
        vision_config=image,
        vision_start_token_id=begin,
        vision_end_token_id=end,
        image_token_id=pictured,
        video_token_id=5,
    )
    with options.device:
        model = transformers.Qwen2VLForConditionalGeneration(config).bfloat16()
    patches = torch.randn(side * side, 3 * 2 * 14 * 14, dtype=torch.bfloat16)
    batches = []
    for ids in _tokens(options, 1, length, first=6):
        ids[0, 0] = begin
        ids[0, 1 : 1 + side * side // 4] = pictured
        ids[0, 1 + side * side // 4] = end
        is_text = ids != pictured
        batches.append(
            {
                "input_ids": ids,
                "labels": ids.where(is_text, -100),
                "mm_token_type_ids": (~is_text).int(),
                "pixel_values": patches,
                "image_grid_thw": torch.tensor([[1, side, side]]),
            }
        )
    return Workload(model, _on(options.device, batches))


def make_whisper(options: argparse.Namespace) -> Workload:
    """Return Whisper as wide as its large version, with 12 layers each way and half a minute."""
    transformers = import_module("transformers")
    small = options.small
    count, spectra, length = (2, 100, 32) if small else (8, 1500, 448)
    width, layers = (64, 2) if small else (1280, 12)
    each = {
        f"{part}_{name}": value
        for part in ("encoder", "decoder")
        for name, value in (
            ("layers", layers),
            ("attention_heads", width // 64),
            ("ffn_dim", 4 * width),
        )
    }
    config = transformers.WhisperConfig(
        vocab_size=500 if small else 51_866,
        d_model=width,
        num_mel_bins=80,
        max_source_positions=spectra,
        max_target_positions=length,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        decoder_start_token_id=1,
        **each,
    )
    with options.device:
        model = transformers.WhisperForConditionalGeneration(config).bfloat16()
    heard = torch.randn(count, 80, 2 * spectra, dtype=torch.bfloat16)
    batches = [
        {"input_features": heard, "labels": labels}
        for labels in _tokens(options, count, length, first=6)
    ]
    return Workload(model, _on(options.device, batches))


def make_diffusion(options: argparse.Namespace) -> Workload:
    """Return diffusers' UNet in the shape of Stable Diffusion 1.5, with 16 latents of 64 x 64."""
    small = options.small
    side, count, words, width = (16, 2, 7, 32) if small else (64, 16, 77, 768)
    sizes: dict[str, Any] = {"block_out_channels": (32, 64, 64, 64)} if small else {}
    groups = {"norm_num_groups": 8} if small else {}
    with options.device:
        unet = import_module("diffusers").UNet2DConditionModel(
            sample_size=side, cross_attention_dim=width, **sizes, **groups
        )
    shapes = {"sample": (count, 4, side, side), "encoder_hidden_states": (count, words, width)}
    batch = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    batch["timestep"] = torch.arange(count)

    def loss(model: Any, batch: Batch) -> Tensor:
        return nn.functional.mse_loss(model(**batch).sample.float(), batch["sample"].float())

    return Workload(unet.bfloat16(), _on(options.device, [batch]) * options.steps, loss)


def make_torchtitan(options: argparse.Namespace) -> Workload:
    """Return torchtitan's Llama 8B with fewer layers; a CPU takes PyTorch's attention."""
    if options.device.type == "cpu":
        attention = import_module("torchtitan.models.common.attention").FlexAttention
        attention.compiled_flex_attn = staticmethod(_causal)
    registry = import_module("torchtitan.models.llama3").model_registry
    config = registry("debugmodel" if options.small else "8B").model
    config.layers = config.layers[: 2 if options.small else options.layers]
    with options.device:
        model = config.build()
        model.init_states(buffer_device=options.device)
    batches = []
    for tokens in _tokens(options, 1, options.tokens):
        positions = torch.arange(options.tokens)[None]
        batches.append({"tokens": tokens % config.vocab_size, "positions": positions})

    def loss(model: Any, batch: Batch) -> Tensor:
        positions = batch["positions"]
        logits = model(batch["tokens"], positions, model.get_attention_masks(positions))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch["tokens"].flatten())

    return Workload(model.bfloat16(), _on(options.device, batches), loss)


def _causal(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, None]:
    """Return what FlexAttention would, for one document: it has no backward pass on a CPU."""
    shared = {name: options[name] for name in ("scale", "enable_gqa")}
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, **shared), None


def checkpoint(model: Any) -> None:
    """Have each block checkpointed as the model's own library does it."""
    if hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=REENTRANT)
        if hasattr(model, "peft_config"):
            model.enable_input_require_grads()
    elif hasattr(model, "enable_gradient_checkpointing"):  # diffusers
        model.enable_gradient_checkpointing()
    else:
        policies = import_module("torchtitan.distributed.activation_checkpoint")
        policies.FullAC.Config().build(dump_folder="").apply(model)
