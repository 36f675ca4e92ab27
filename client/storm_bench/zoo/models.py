"""The models of the zoo, and how a step of each computes its loss.

They are made from configurations, with random weights: nothing is downloaded. Widths are those of
models that people train on one GPU. Small versions are narrow and short, to try the benchmark out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor, nn

from storm_bench.train.methods import Unavailable

__all__ = [
    "WORKLOADS",
    "Size",
    "Workload",
    "of_batch",
    "of_images",
    "of_tokens",
    "transformer",
]

_CLASSES: Final = 1000


@dataclass(frozen=True, slots=True)
class Size:
    """Where a model is made, and whether it is its small version."""

    device: torch.device
    is_small: bool
    tokens: int = 8192
    """Tokens in the batch of one rank."""

    def of(self, whole: int, small: int) -> int:
        """Return `small` for a small version, else `whole`."""
        return small if self.is_small else whole

    @property
    def vocabulary(self) -> int:
        """The size of the language models' vocabulary."""
        return self.of(32_000, 500)


@dataclass(frozen=True, slots=True)
class Workload:
    """A model, and a function that computes the loss of its next step."""

    model: nn.Module
    loss: Callable[[nn.Module], Tensor]
    autocast: torch.dtype | None = None
    """None without autocast; for float16 the loss is scaled."""


def transformer(size: Size, name: str, **settings: Any) -> Any:
    """Return a model of the library transformers by the name of its class."""
    made = getattr(import_module("transformers"), name)
    with size.device:
        return made(made.config_class(vocab_size=size.vocabulary, **settings))


def of_tokens(
    size: Size, model: nn.Module, rows: int, tokens: int, autocast: torch.dtype | None = None
) -> Workload:
    """Return the workload of a language model on random tokens, int64 [rows, tokens]."""
    shape = (rows, size.of(tokens, 64))
    batch = torch.randint(0, size.vocabulary, shape, device=size.device)
    return of_batch(model, autocast, input_ids=batch, labels=batch)


def of_batch(model: nn.Module, autocast: torch.dtype | None, **batch: Tensor) -> Workload:
    """Return the workload of a model that computes a batch's loss itself, as transformers' do."""

    def loss(trained: nn.Module) -> Tensor:
        found: Tensor = trained(**batch).loss
        return found

    return Workload(model, loss, autocast)


def _llama(size: Size, **changes: Any) -> Any:
    """Return transformers' Llama, in float32: of width 2048 unless `changes` say otherwise."""
    settings = {
        "hidden_size": size.of(2048, 64),
        "intermediate_size": size.of(8192, 256),
        "num_hidden_layers": size.of(10, 2),
        "num_attention_heads": size.of(16, 4),
        "num_key_value_heads": size.of(8, 2),
        "max_position_embeddings": 8192,
        "use_cache": False,
    }
    return transformer(size, "LlamaForCausalLM", **settings | changes)


def _make_llama(size: Size) -> Workload:
    return of_tokens(size, _llama(size).bfloat16(), 2, 4096)


def _make_lora(size: Size) -> Workload:
    peft = import_module("peft")
    settings = peft.LoraConfig(r=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return of_tokens(size, peft.get_peft_model(_llama(size).bfloat16(), settings), 2, 4096)


def _make_liger(size: Size) -> Workload:
    if size.device.type != "cuda":
        raise Unavailable("Liger's kernels need a GPU, and there is no GPU here")
    import_module("liger_kernel.transformers").apply_liger_kernel_to_llama()
    return _make_llama(size)


def _make_float8(size: Size) -> Workload:
    model = _llama(size).bfloat16()
    import_module("torchao.float8").convert_to_float8_training(model.model)
    return of_tokens(size, model, 2, 4096)


def _make_autocast(size: Size, dtype: torch.dtype) -> Workload:
    return of_tokens(size, _llama(size, num_hidden_layers=size.of(6, 2)), 2, 4096, dtype)


def _make_moe(size: Size) -> Workload:
    model = transformer(
        size,
        "Qwen3MoeForCausalLM",
        hidden_size=size.of(1024, 64),
        intermediate_size=size.of(3072, 128),
        moe_intermediate_size=size.of(768, 64),
        num_hidden_layers=size.of(8, 2),
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=size.of(64, 16),
        num_experts=16,
        num_experts_per_tok=4,
        output_router_logits=True,
        max_position_embeddings=4096,
        use_cache=False,
    )
    return of_tokens(size, model.bfloat16(), 2, 4096)


def _make_eager(size: Size) -> Workload:
    """Return a Llama whose attention is plain operations, on shorter sequences."""
    model = _llama(size, num_hidden_layers=size.of(6, 2), attn_implementation="eager")
    return of_tokens(size, model.bfloat16(), 4, 1024)


def _make_gpt2(size: Size) -> Workload:
    model = transformer(
        size,
        "GPT2LMHeadModel",
        n_embd=size.of(1024, 64),
        n_layer=size.of(16, 2),
        n_head=16,
        n_positions=1024,
        use_cache=False,
    )
    return of_tokens(size, model, 8, 1024, torch.bfloat16)


def _make_bert(size: Size) -> Workload:
    model = transformer(
        size,
        "BertForMaskedLM",
        hidden_size=size.of(1024, 64),
        num_hidden_layers=size.of(16, 2),
        num_attention_heads=16,
        intermediate_size=size.of(4096, 256),
        max_position_embeddings=512,
    )
    return of_tokens(size, model, 16, 512, torch.bfloat16)


def _make_t5(size: Size) -> Workload:
    model = transformer(
        size,
        "T5ForConditionalGeneration",
        d_model=size.of(1024, 64),
        d_ff=size.of(4096, 256),
        d_kv=size.of(64, 16),
        num_layers=size.of(12, 2),
        num_heads=size.of(16, 4),
        decoder_start_token_id=0,
        use_cache=False,
    )
    return of_tokens(size, model, 16, 512, torch.bfloat16)


def _make_whisper(size: Size) -> Workload:
    layers, heads, inner = size.of(12, 2), size.of(12, 4), size.of(3072, 256)
    model = transformer(
        size,
        "WhisperForConditionalGeneration",
        d_model=size.of(768, 64),
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=inner,
        decoder_ffn_dim=inner,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
        decoder_start_token_id=0,
        use_cache=False,
    )
    count = size.of(16, 1)
    heard = torch.randn(count, 80, 3000, device=size.device)
    text = torch.randint(0, size.vocabulary, (count, size.of(448, 64)), device=size.device)
    return of_batch(model, torch.bfloat16, input_features=heard, labels=text)


def _make_wav2vec2(size: Size) -> Workload:
    """Return a speech model that does not mask or drop layers at random."""
    model = transformer(
        size,
        "Wav2Vec2ForCTC",
        hidden_size=size.of(768, 64),
        num_hidden_layers=size.of(12, 2),
        num_attention_heads=size.of(12, 4),
        intermediate_size=size.of(3072, 256),
        mask_time_prob=0.0,
        layerdrop=0.0,
    )
    count = size.of(16, 2)
    sound = torch.randn(count, size.of(160_000, 8_000), device=size.device)
    text = torch.randint(1, size.vocabulary, (count, size.of(60, 8)), device=size.device)
    return of_batch(model, torch.bfloat16, input_values=sound, labels=text)


def of_images(size: Size, whole: str, small: str, count: int) -> Workload:
    """Return the workload of a model of timm that classifies random images."""
    timm = import_module("timm")
    model = timm.create_model(small if size.is_small else whole, num_classes=_CLASSES)
    count = size.of(count, 2)
    images = torch.randn(count, 3, 224, 224, device=size.device)
    classes = torch.randint(0, _CLASSES, (count,), device=size.device)
    return Workload(
        model.to(size.device),
        lambda trained: nn.functional.cross_entropy(trained(images), classes),
        torch.bfloat16,
    )


def _make_ranks(size: Size) -> Workload:
    """Return layers with the shapes of Llama 8B, and the batch of one rank."""
    model = _llama(
        size,
        max_position_embeddings=max(8192, size.tokens),
        hidden_size=size.of(4096, 256),
        intermediate_size=size.of(14336, 896),
        num_hidden_layers=size.of(6, 2),
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    return of_tokens(size, model.bfloat16(), 1, size.tokens)


def _make_split(size: Size) -> Workload:
    """Return a Llama whose first layers are on one GPU and whose last ones are on another."""
    model = _llama(size).bfloat16()
    if not size.is_small:
        if torch.cuda.device_count() < 2:
            raise Unavailable(f"it needs two GPUs, and here are {torch.cuda.device_count()}")
        half = len(model.model.layers) // 2
        places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1}
        places |= {f"model.layers.{n}": int(n >= half) for n in range(2 * half)}
        model = import_module("accelerate").dispatch_model(model, device_map=places)
    return of_tokens(size, model, 2, 4096)


WORKLOADS: Final[dict[str, Callable[[Size], Workload]]] = {
    "llama": _make_llama,
    "lora": _make_lora,
    "liger": _make_liger,
    "float8": _make_float8,
    "fp32amp": lambda size: _make_autocast(size, torch.bfloat16),
    "fp16scaler": lambda size: _make_autocast(size, torch.float16),
    "moe": _make_moe,
    "vit": lambda size: of_images(size, "vit_large_patch16_224", "vit_tiny_patch16_224", 128),
    "gpt2": _make_gpt2,
    "bert": _make_bert,
    "convnext": lambda size: of_images(size, "convnext_base", "convnext_atto", 96),
    "eager": _make_eager,
    "t5": _make_t5,
    "whisper": _make_whisper,
    "wav2vec2": _make_wav2vec2,
    "resnet": lambda size: of_images(size, "resnet50", "resnet18", 256),
    "swin": lambda size: of_images(
        size, "swin_base_patch4_window7_224", "swin_tiny_patch4_window7_224", 96
    ),
    "efficientnet": lambda size: of_images(size, "efficientnet_b4", "efficientnet_b0", 96),
    "ranks": _make_ranks,
    "split": _make_split,
}
"""Each raises ImportError or Unavailable if it cannot be made here."""
