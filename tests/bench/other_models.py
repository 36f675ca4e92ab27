"""Models that nobody has tuned stormd for, beside those of `stormd bench zoo`: see `in_turns.py`.

They are chosen for their variety, not for their results: language and vision models of
transformers, timm, diffusers and torchvision, and modules written by hand whose blocks are
checkpointed one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from storm_bench.zoo.models import Size, Workload, of_batch, of_images, of_tokens, transformer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Make = Callable[[Size], Workload]
Pair = tuple[int, int]  # a width of the whole model, and of its small version

DECODER = {
    "hidden_size": (1536, 64),
    "num_hidden_layers": (12, 2),
    "num_attention_heads": (12, 4),
    "intermediate_size": (6144, 128),
}
"""Of a language model; others replace some."""


def of_sizes(size: Size, name: str, **settings: Any) -> Any:
    """Return a model of transformers by its class; settings that are pairs depend on the size."""
    widths = {
        key: size.of(*one) if isinstance(one, tuple) else one for key, one in settings.items()
    }
    return transformer(size, name, **widths)


def language(
    name: str, rows: int, tokens: int, dtype: torch.dtype | None = torch.bfloat16, **settings: Any
) -> Make:
    """Return what makes a language model on random tokens, with autocast to `dtype`."""

    def make(size: Size) -> Workload:
        model = of_sizes(size, name, **settings)
        model.config.use_cache = False
        return of_tokens(size, model, rows, tokens, dtype)

    return make


def image(name: str, small: str, count: int) -> Make:
    """Return what makes a classifier of timm on so many random images."""
    return lambda size: of_images(size, name, small, count)


def clip(size: Size) -> Workload:
    text = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
    vision = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}
    if size.is_small:
        text = vision = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    text = text | {"num_hidden_layers": size.of(12, 2), "vocab_size": 1000, "eos_token_id": 2}
    depth, patch = size.of(16, 2), size.of(14, 56)
    vision = vision | {"num_hidden_layers": depth, "image_size": 224, "patch_size": patch}
    model = transformer(size, "CLIPModel", text_config=text, vision_config=vision)
    count = size.of(96, 2)
    batch = {
        "input_ids": torch.randint(3, 1000, (count, 77), device=size.device),
        "pixel_values": torch.randn(count, 3, 224, 224, device=size.device),
    }
    return Workload(model, lambda one: one(**batch, return_loss=True).loss, torch.bfloat16)


def segformer(size: Size) -> Workload:
    model = of_sizes(
        size,
        "SegformerForSemanticSegmentation",
        depths=[1] * 4 if size.is_small else [3, 6, 12, 3],
        hidden_sizes=[16, 16, 32, 32] if size.is_small else [64, 128, 320, 512],
        decoder_hidden_size=(512, 32),
        num_labels=20,
    )
    count, width = size.of(12, 1), size.of(512, 64)
    pixels = torch.randn(count, 3, width, width, device=size.device)
    labels = torch.randint(0, 20, (count, width, width), device=size.device)
    return of_batch(model, torch.bfloat16, pixel_values=pixels, labels=labels)


def videomae(size: Size) -> Workload:
    model = of_sizes(
        size,
        "VideoMAEForVideoClassification",
        hidden_size=(768, 64),
        num_hidden_layers=(12, 2),
        num_attention_heads=(12, 4),
        intermediate_size=(3072, 128),
        image_size=(224, 32),
        num_labels=100,
    )
    width = size.of(224, 32)
    video = torch.randn(size.of(16, 1), 16, 3, width, width, device=size.device)
    labels = torch.randint(0, 100, video.shape[:1], device=size.device)
    return of_batch(model, torch.bfloat16, pixel_values=video, labels=labels)


def diffusion(size: Size, model: Any, loss: Callable[[Any], Tensor]) -> Workload:
    """Return the workload of a model of diffusers, whose switch has a name of its own."""
    switch = type(model).enable_gradient_checkpointing
    type(model).gradient_checkpointing_enable = lambda self, **_: switch(self)
    return Workload(model.to(size.device), loss, torch.bfloat16)


def unet(size: Size) -> Workload:
    model = import_module("diffusers").UNet2DConditionModel(
        sample_size=size.of(64, 16),
        block_out_channels=(32,) * 4 if size.is_small else (320, 640, 1280, 1280),
        cross_attention_dim=size.of(768, 32),
        attention_head_dim=8,
        norm_num_groups=size.of(32, 8),
    )
    count, width = size.of(16, 1), size.of(64, 16)
    noise = torch.randn(count, 4, width, width, device=size.device)
    times = torch.randint(0, 1000, (count,), device=size.device)
    text = torch.randn(count, 77, size.of(768, 32), device=size.device)
    return diffusion(size, model, lambda one: F.mse_loss(one(noise, times, text).sample, noise))


def vae(size: Size) -> Workload:
    model = import_module("diffusers").AutoencoderKL(
        block_out_channels=(32,) * 4 if size.is_small else (128, 256, 512, 512),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=2,
        norm_num_groups=size.of(32, 8),
    )
    width = size.of(256, 32)
    images = torch.randn(size.of(4, 1), 3, width, width, device=size.device)
    return diffusion(size, model, lambda one: F.mse_loss(one(images).sample, images))


def sd3(size: Size) -> Workload:
    model = import_module("diffusers").SD3Transformer2DModel(
        sample_size=size.of(64, 16),
        num_layers=size.of(12, 2),
        attention_head_dim=size.of(64, 16),
        num_attention_heads=size.of(20, 2),
        joint_attention_dim=size.of(1024, 32),
        caption_projection_dim=size.of(1280, 32),
        pooled_projection_dim=size.of(512, 32),
    )
    count, width = size.of(8, 1), size.of(64, 16)
    noise = torch.randn(count, 16, width, width, device=size.device)
    inputs = {
        "encoder_hidden_states": torch.randn(count, 77, size.of(1024, 32), device=size.device),
        "pooled_projections": torch.randn(count, size.of(512, 32), device=size.device),
        "timestep": torch.rand(count, device=size.device),
    }
    return diffusion(size, model, lambda one: F.mse_loss(one(noise, **inputs).sample, noise))


class Blocks(nn.Module):
    """Layers that run one after another; each is checkpointed if that is switched on."""

    def __init__(self, first: nn.Module, layers: list[nn.Module], last: nn.Module) -> None:
        super().__init__()
        self.first, self.layers, self.last = first, nn.ModuleList(layers), last
        self.is_checkpointed = False

    def gradient_checkpointing_enable(self, **_: object) -> None:
        self.is_checkpointed = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.is_checkpointed else layer(x)
        return self.last(x)


def sequence(
    size: Size,
    make: Callable[[int], nn.Module],
    count: Pair,
    shape: Pair,
    dtype: torch.dtype | None,
) -> Workload:
    """Return a language model of layers of width 1024 that `make` makes, on random tokens."""
    width, words = size.of(1024, 64), 1000
    layers = [make(width) for _ in range(size.of(*count))]
    model = Blocks(nn.Embedding(words, width), layers, nn.Linear(width, words)).to(size.device)
    rows = (2, 16) if size.is_small else shape
    tokens = torch.randint(0, words, rows, device=size.device)
    return Workload(
        model, lambda one: F.cross_entropy(one(tokens).flatten(0, 1), tokens.flatten()), dtype
    )


class Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lstm(x)[0]


def encoder(width: int) -> nn.Module:
    """Return a layer of PyTorch's own encoder."""
    heads = width // 64 if width > 64 else 4
    return nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True, norm_first=True)


class Causal(nn.Module):
    """A layer as people write it by hand."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64 if width > 64 else 4
        self.norm, self.mixing = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU("tanh"),
            nn.Linear(4 * width, width),
            nn.Dropout(0.1),
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = self.mixing(self.norm(x)).chunk(3, 2)
        q, k, v = (one.unflatten(2, (self.heads, -1)).transpose(1, 2) for one in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), 0.1)
        return x + self.mlp(x)


class Messages(nn.Module):
    """A layer of a graph network, which sends along each edge."""

    def __init__(self, width: int, source: Tensor, target: Tensor) -> None:
        super().__init__()
        self.source, self.target = source, target
        self.edge = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, width))
        self.node, self.norm = nn.Linear(2 * width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        sent = self.edge(torch.cat([x[self.source], x[self.target]], -1))
        received = torch.zeros_like(x).index_add_(0, self.target, sent)
        return self.norm(x + F.relu(self.node(torch.cat([x, received], -1))))


def graph(size: Size) -> Workload:
    nodes, width = size.of(200_000, 200), size.of(256, 16)
    edges = torch.randint(0, nodes, (2, 5 * nodes), device=size.device)
    layers: list[nn.Module] = [Messages(width, *edges) for _ in range(6)]
    model = Blocks(nn.Identity(), layers, nn.Linear(width, 10)).to(size.device)
    x = torch.randn(nodes, width, device=size.device)
    classes = torch.randint(0, 10, (nodes,), device=size.device)
    return Workload(model, lambda one: F.cross_entropy(one(x), classes))


class UNet3d(Blocks):
    def __init__(self, width: int) -> None:
        def block(before: int, after: int) -> nn.Module:
            sizes = (before, after), (after, after)
            parts = [
                (nn.Conv3d(*one, 3, padding=1), nn.GroupNorm(4, after), nn.LeakyReLU(0.01, True))
                for one in sizes
            ]
            return nn.Sequential(*parts[0], *parts[1])

        channels = [1, width, 2 * width, 4 * width, 8 * width]
        down = [block(*channels[at : at + 2]) for at in range(4)]
        up = [block(3 * wide, wide) for wide in channels[3:0:-1]]
        super().__init__(nn.Identity(), [*down, *up], nn.Conv3d(width, 3, 1))

    def forward(self, x: Tensor) -> Tensor:
        run = partial(checkpoint, use_reentrant=False) if self.is_checkpointed else _call
        skipped: list[Tensor] = []
        for layer in self.layers[:4]:
            x = run(layer, F.max_pool3d(x, 2) if skipped else x)
            skipped.append(x)
        for layer, other in zip(self.layers[4:], reversed(skipped[:-1]), strict=True):
            wide = F.interpolate(x, scale_factor=2, mode="trilinear")
            x = run(layer, torch.cat([wide, other], 1))
        return self.last(x)


def _call(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)


def unet3d(size: Size) -> Workload:
    model, width = UNet3d(size.of(32, 4)).to(size.device), size.of(128, 16)
    scans = torch.randn(size.of(2, 1), 1, width, width, width, device=size.device)
    classes = torch.randint(0, 3, scans[:, 0].shape, device=size.device)
    return Workload(model, lambda one: F.cross_entropy(one(scans), classes), torch.bfloat16)


def retinanet(size: Size) -> Workload:
    detection = import_module("torchvision").models.detection
    model = detection.retinanet_resnet50_fpn(
        weights=None, weights_backbone=None, num_classes=10
    ).to(size.device)
    width, count = size.of(512, 128), size.of(4, 1)
    images = [torch.rand(3, width, width, device=size.device) for _ in range(count)]
    boxes = torch.tensor([[10.0, 10, 80, 80], [20, 30, 100, 90]], device=size.device)
    found = {"boxes": boxes, "labels": torch.tensor([1, 2], device=size.device)}
    return Workload(
        model, lambda one: sum(one(images, [dict(found)] * count).values()), torch.bfloat16
    )


WIDE: dict[str, Any] = DECODER | {"hidden_size": (1024, 64), "num_attention_heads": (16, 4)}

OTHERS: dict[str, Make] = {
    "opt": language(
        "OPTForCausalLM",
        4,
        2048,
        hidden_size=(1536, 64),
        word_embed_proj_dim=(1536, 64),
        num_hidden_layers=(12, 2),
        num_attention_heads=(12, 4),
        ffn_dim=(6144, 128),
    ),
    "bloom": language(
        "BloomForCausalLM", 4, 2048, hidden_size=(1536, 64), n_layer=(12, 2), n_head=(12, 4)
    ),
    "neox": language("GPTNeoXForCausalLM", 4, 2048, **DECODER),
    "phi": language("PhiForCausalLM", 4, 2048, **DECODER),
    "falcon": language(
        "FalconForCausalLM",
        4,
        2048,
        **{key: one for key, one in DECODER.items() if key != "intermediate_size"},
    ),
    "gemma3": language(
        "Gemma3ForCausalLM",
        2,
        4096,
        None,
        hidden_size=(1152, 64),
        intermediate_size=(6912, 128),
        num_hidden_layers=(12, 2),
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=(256, 16),
    ),
    "qwen3": language(
        "Qwen3ForCausalLM", 2, 4096, num_key_value_heads=(4, 2), head_dim=(128, 16), **DECODER
    ),
    "olmo2": language("Olmo2ForCausalLM", 2, 4096, num_key_value_heads=(4, 2), **DECODER),
    "mixtral": language(
        "MixtralForCausalLM",
        2,
        2048,
        hidden_size=(1024, 64),
        intermediate_size=(2048, 128),
        num_hidden_layers=(8, 2),
        num_attention_heads=(16, 4),
        num_key_value_heads=(4, 2),
        num_local_experts=(8, 4),
    ),
    "mamba2": language(
        "Mamba2ForCausalLM",
        2,
        1024,
        hidden_size=(768, 64),
        num_hidden_layers=(8, 2),
        num_heads=(24, 8),
        head_dim=(64, 16),
        n_groups=1,
        state_size=(64, 16),
        eos_token_id=0,
    ),
    "albert": language(
        "AlbertForMaskedLM",
        16,
        512,
        embedding_size=(128, 32),
        hidden_size=(2048, 64),
        num_hidden_layers=(16, 2),
        num_attention_heads=(16, 4),
        intermediate_size=(8192, 128),
    ),
    "electra": language("ElectraForMaskedLM", 16, 512, embedding_size=(1024, 64), **WIDE),
    "clip": clip,
    "segformer": segformer,
    "videomae": videomae,
    "unet": unet,
    "vae": vae,
    "sd3": sd3,
    "lstm": lambda size: sequence(size, Recurrent, (4, 4), (64, 512), None),
    "encoder": lambda size: sequence(size, encoder, (12, 2), (16, 1024), torch.bfloat16),
    "causal": lambda size: sequence(size, Causal, (16, 2), (16, 1024), torch.bfloat16),
    "graph": graph,
    "unet3d": unet3d,
    "retinanet": retinanet,
    "maxvit": image("maxvit_tiny_tf_224", "maxvit_tiny_tf_224", 64),
    "coatnet": image("coatnet_1_rw_224", "coatnet_nano_rw_224", 64),
    "regnet": image("regnety_032", "regnety_002", 192),
    "densenet": image("densenet121", "densenet121", 128),
    "beit": image("beit_base_patch16_224", "beit_base_patch16_224", 128),
    "hrnet": image("hrnet_w18", "hrnet_w18_small", 96),
}
"""Each raises ImportError if its library is missing."""
