"""The models that `frameworks.py` trains, from configurations, with random weights and batches.

Nothing is downloaded. Each has a width that people train on one GPU, or is small, to try it out.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import replace
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
    workload = make_llama(options)
    return workload._replace(model=_with_lora(workload.model))


def make_qlora(options: argparse.Namespace) -> Workload:
    """Return the same with its projections' weights in four bits, as a checkpoint is loaded."""
    import_module("bitsandbytes")  # transformers' message for a missing one is no ImportError
    transformers, workload = import_module("transformers"), make_llama(options)
    four_bits = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    with tempfile.TemporaryDirectory() as folder:
        workload.model.save_pretrained(folder)
        model = transformers.LlamaForCausalLM.from_pretrained(
            folder,
            dtype=torch.bfloat16,
            quantization_config=four_bits,
            device_map={"": options.device},
        )
    return workload._replace(model=_with_lora(model))


def _with_lora(model: Any) -> Any:
    peft = import_module("peft")
    settings = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, settings)


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
    """Return diffusers' UNet in the shape of Stable Diffusion 1.5, with 16 latents of 64 x 64.

    It learns the noise that diffusers' scheduler adds to the latents, a time for each.
    """
    diffusers = import_module("diffusers")
    small = options.small
    side, count, words, width = (16, 2, 7, 32) if small else (64, 16, 77, 768)
    sizes: dict[str, Any] = {"block_out_channels": (32, 64, 64, 64)} if small else {}
    groups = {"norm_num_groups": 8} if small else {}
    with options.device:
        unet = diffusers.UNet2DConditionModel(
            sample_size=side, cross_attention_dim=width, **sizes, **groups
        )
    scheduler, batches = diffusers.DDPMScheduler(), []
    text = torch.randn(count, words, width, dtype=torch.bfloat16)
    for _ in range(options.steps):
        latents, noise = torch.randn(2, count, 4, side, side, dtype=torch.bfloat16)
        times = torch.randint(scheduler.config.num_train_timesteps, (count,))
        batches.append(
            {
                "sample": scheduler.add_noise(latents, noise, times),
                "timestep": times,
                "encoder_hidden_states": text,
                "noise": noise,
            }
        )

    def loss(model: Any, batch: Batch) -> Tensor:
        given = {name: one for name, one in batch.items() if name != "noise"}
        return nn.functional.mse_loss(model(**given).sample.float(), batch["noise"].float())

    return Workload(unet.bfloat16(), _on(options.device, batches), loss)


def make_torchtitan(options: argparse.Namespace) -> Workload:
    """Return torchtitan's Llama 8B with fewer layers and words."""
    llama3 = import_module("torchtitan.models.llama3")
    make = _torchtitan if hasattr(llama3, "model_registry") else _torchtitan_before_0_3
    with options.device:
        model, more = make(options, llama3)
    words = model.tok_embeddings.weight.shape[0]
    batches = [{"tokens": one % words} for one in _tokens(options, 1, options.tokens)]

    def loss(model: Any, batch: Batch) -> Tensor:
        logits = model(batch["tokens"], *more())
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch["tokens"].flatten())

    return Workload(model.bfloat16(), _on(options.device, batches), loss)


def _torchtitan(
    options: argparse.Namespace, llama3: Any
) -> tuple[Any, Callable[[], tuple[Any, ...]]]:
    """Return the model, and what its forward takes beside tokens. A CPU takes PyTorch's attention.

    torchtitan 0.3 needs PyTorch 2.12: it imports `DataParallelMeshDims`.
    """
    if options.device.type == "cpu":
        attention = import_module("torchtitan.models.common.attention").FlexAttention
        attention.compiled_flex_attn = staticmethod(_causal)
    config = llama3.model_registry("debugmodel" if options.small else "8B").model
    config.layers = config.layers[: 2 if options.small else options.layers]
    if not options.small:
        config.vocab_size = VOCABULARY
        config.tok_embeddings.num_embeddings = config.lm_head.out_features = VOCABULARY
    model = config.build()
    model.init_states(buffer_device=options.device)
    positions = torch.arange(options.tokens, device=options.device)[None]
    return model, lambda: (positions, model.get_attention_masks(positions))


def _torchtitan_before_0_3(
    options: argparse.Namespace, llama3: Any
) -> tuple[Any, Callable[[], tuple[Any, ...]]]:
    """Return the model, whose forward takes tokens only: its attention is PyTorch's."""
    arguments = llama3.llama3_args["debugmodel" if options.small else "8B"]
    less = {"n_layers": 2 if options.small else options.layers, "max_seq_len": options.tokens}
    if not options.small:
        less["vocab_size"] = VOCABULARY
    model = llama3.Transformer(replace(arguments, **less))
    with torch.no_grad():
        model.init_weights()
    return model, tuple


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
        if hasattr(policies, "FullAC"):
            policies.FullAC.Config().build(dump_folder="").apply(model)
        else:  # before 0.3
            settings = import_module("torchtitan.config.job_config").ActivationCheckpoint
            policies.apply_ac(model, settings(mode="full"))
