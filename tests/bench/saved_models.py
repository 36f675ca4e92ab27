"""Small models of many kinds, for what a step of each saves: by hand, or transformers' own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from storm_bench.zoo.models import WORKLOADS, Size, Workload
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["MODELS", "SMALL"]


class _ManyWords(Size):
    """As many as whole models know: then the loss is computed in tiles, as theirs is."""

    @property
    def vocabulary(self) -> int:
        return 32_000


SMALL = _ManyWords(torch.device("cpu"), is_small=True)

WORDS, ROWS, LENGTH, WIDTH = 100, 2, 64, 64

_DECODER: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
}
_SEQUENCES: dict[str, Any] = {"vocab_size": WORDS, "d_model": WIDTH, "use_cache": False}

Make = Callable[[], Workload]


def of_transformers(model: str, config: str, **settings: Any) -> Make:
    """Return how to make a model of transformers, in bfloat16, that predicts random tokens."""

    def make() -> Workload:
        transformers = import_module("transformers")
        made = getattr(transformers, model)(getattr(transformers, config)(**settings)).bfloat16()
        tokens = torch.randint(3, WORDS - 10, (ROWS, LENGTH))
        given = {"input_ids": tokens}
        if model.startswith("Whisper"):
            given = {"input_features": torch.randn(ROWS, 80, 300).bfloat16()}
        return Workload(made, lambda it: it(**given, labels=tokens).loss)

    return make


class Gated(torch.autograd.Function):
    """As Liger's: rows of its inputs are saved, and a kernel fills what it returns a view of."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        rows, others = a.view(-1, a.shape[-1]), b.view(-1, a.shape[-1])
        made = torch.empty_like(rows)
        made.copy_(F.silu(rows) * others)
        ctx.save_for_backward(rows, others)
        return made.view(a.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        rows, gate = grad.view(a.shape), torch.sigmoid(a)
        slope = gate * (1 + a * (1 - gate))
        return (rows * b * slope).view(grad.shape), (rows * a * gate).view(grad.shape)


class Normed(torch.autograd.Function):
    """A norm written so, with one number a row saved besides."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = x.view(-1, x.shape[-1])
        made = torch.empty_like(rows)
        scale = torch.empty(len(rows), 1)
        scale.copy_(torch.rsqrt(rows.float().square().mean(-1, keepdim=True) + eps))
        made.copy_((rows.float() * scale).to(rows.dtype) * weight)
        ctx.save_for_backward(rows, weight, scale)
        return made.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weight, scale = ctx.saved_tensors
        given, normed = grad.view(rows.shape).float(), rows.float() * scale
        ahead = given * weight
        back = scale * (ahead - normed * (ahead * normed).mean(-1, keepdim=True))
        return back.to(grad.dtype).view(grad.shape), (given * normed).sum(0).to(weight.dtype), None


def _gated(mlp: Any, x: Tensor) -> Tensor:
    return mlp.down_proj(Gated.apply(mlp.gate_proj(x), mlp.up_proj(x)))  # type: ignore[no-any-return]


def _normed(norm: Any, x: Tensor) -> Tensor:
    return Normed.apply(x, norm.weight, norm.variance_epsilon)  # type: ignore[no-any-return]


def liger() -> Workload:
    """Return a Llama whose norms and gated products are functions of its own."""
    work = WORKLOADS["llama"](SMALL)
    model: Any = work.model
    for layer in model.model.layers:
        layer.mlp.forward = partial(_gated, layer.mlp)
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.forward = partial(_normed, norm)
    return work


def float8() -> Workload:
    """Return a Llama whose products are torchao's, in float32 where a CPU has no others."""
    package, work = import_module("torchao.float8"), WORKLOADS["llama"](SMALL)
    model: Any = work.model
    package.convert_to_float8_training(model.model, config=package.Float8LinearConfig(emulate=True))
    return work


def of_classes(model: nn.Module, *given: Tensor, autocast: torch.dtype | None = None) -> Workload:
    """Return a model that tells ten classes apart, one for each row that it returns."""
    with torch.no_grad():
        count = len(model(*given))
    targets = torch.randint(0, 10, (count,))
    return Workload(model, lambda it: F.cross_entropy(it(*given), targets), autocast)


class Transformer(nn.Module):
    """A vision or diffusion transformer's block: with `condition`, norms are shifted by it."""

    def __init__(self, *, is_conditioned: bool) -> None:
        super().__init__()
        affine = not is_conditioned
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, elementwise_affine=affine) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(approximate="tanh"), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.shifts = nn.Linear(WIDTH, 6 * WIDTH) if is_conditioned else None

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scales: tuple[Any, ...] = (0, 0, 1, 0, 0, 1)
        if self.shifts is not None:
            scales = self.shifts(F.silu(condition))[:, None].chunk(6, -1)
        h = self.norms[0](x) * (1 + scales[0]) + scales[1]
        q, k, v = self.qkv(h).view(*h.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + scales[2] * self.out(attended)
        return x + scales[5] * self.mlp(self.norms[1](x) * (1 + scales[3]) + scales[4])


class Patches(nn.Module):
    """Images cut into patches, and blocks of a transformer."""

    def __init__(self, *, is_conditioned: bool) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, WIDTH, 4, 4)
        self.blocks = nn.ModuleList(Transformer(is_conditioned=is_conditioned) for _ in range(4))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor, condition: Tensor) -> Tensor:
        x = self.embed(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x, condition)
        return self.head(x.mean(1))  # type: ignore[no-any-return]


def patches(*, is_conditioned: bool) -> Workload:
    given = torch.randn(4, 3, 32, 32), torch.randn(4, WIDTH)
    return of_classes(Patches(is_conditioned=is_conditioned), *given, autocast=torch.bfloat16)


class ConvNext(nn.Module):
    """A depthwise convolution, a norm over channels and two products."""

    def __init__(self) -> None:
        super().__init__()
        self.depth = nn.Conv2d(WIDTH, WIDTH, 7, padding=3, groups=WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.depth(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.down(F.gelu(self.up(h)))).permute(0, 3, 1, 2)


def convnext() -> Workload:
    blocks = [ConvNext() for _ in range(4)]
    model = nn.Sequential(nn.Conv2d(3, WIDTH, 4, 4), *blocks, nn.AdaptiveAvgPool2d(1))
    head = nn.Sequential(model, nn.Flatten(), nn.Linear(WIDTH, 10))
    return of_classes(head, torch.randn(4, 3, 32, 32), autocast=torch.bfloat16)


class Twice(nn.Sequential):
    """Two convolutions, normalized over the batch and rectified in place."""

    def __init__(self, channels: int, made: int) -> None:
        super().__init__()
        for count in (channels, made):
            self.extend([nn.Conv2d(count, made, 3, padding=1), nn.BatchNorm2d(made)])
            self.append(nn.ReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([Twice(3, 16), Twice(16, 32), Twice(32, 64)])
        self.up = nn.ModuleList(
            [nn.ConvTranspose2d(64, 32, 2, 2), nn.ConvTranspose2d(32, 16, 2, 2)]
        )
        self.joined = nn.ModuleList([Twice(64, 32), Twice(32, 16)])
        self.out = nn.Conv2d(16, 10, 1)

    def forward(self, x: Tensor) -> Tensor:
        skipped = []
        for block in self.down[:-1]:
            skipped.append(block(x))
            x = F.max_pool2d(skipped[-1], 2)
        x = self.down[-1](x)
        for up, block in zip(self.up, self.joined, strict=True):
            x = block(torch.cat([up(x), skipped.pop()], 1))
        return self.out(x).mean((2, 3))  # type: ignore[no-any-return]


class Residual(nn.Module):
    """Two convolutions whose sum with the input is rectified in place, as in a ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.made = nn.Sequential(
            nn.Conv2d(32, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(inplace=True),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.BatchNorm2d(32),
        )

    def forward(self, x: Tensor) -> Tensor:
        made = self.made(x)
        made += x
        return F.relu(made, inplace=True)


def residual() -> Workload:
    begin = [nn.Conv2d(3, 32, 7, 2, 3), nn.BatchNorm2d(32), nn.ReLU(inplace=True)]
    blocks = [nn.MaxPool2d(3, 2, 1), *(Residual() for _ in range(4)), nn.AdaptiveAvgPool2d(1)]
    model = nn.Sequential(*begin, *blocks, nn.Flatten(), nn.Linear(32, 10))
    return of_classes(model, torch.randn(4, 3, 64, 64))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.cells = nn.LSTM(WIDTH, 128, 2, batch_first=True)
        self.head = nn.Linear(128, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.cells(self.embed(tokens))[0].mean(1))  # type: ignore[no-any-return]


class GraphAttention(nn.Module):
    """A layer that weighs the neighbours of each node of a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Linear(WIDTH, WIDTH)
        self.ends = nn.ModuleList(nn.Linear(WIDTH, 4) for _ in range(2))

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        h = self.values(x)
        weight = F.leaky_relu(self.ends[0](h)[source] + self.ends[1](h)[target], 0.2).exp()
        together = torch.zeros(len(x), 4).index_add(0, target, weight)
        share = weight / (together[target] + 1e-9)
        messages = (h[source].view(-1, 4, WIDTH // 4) * share[..., None]).flatten(1)
        return F.elu(torch.zeros(len(x), WIDTH).index_add(0, target, messages)) + x


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(GraphAttention() for _ in range(3))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, source, target)
        return self.head(x)  # type: ignore[no-any-return]


class Ranking(nn.Module):
    """Tables of many things that are looked up, and products of each with each."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(1000, 32) for _ in range(8))
        self.bottom = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(32 + 36, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, dense: Tensor, looked_up: Tensor) -> Tensor:
        x = self.bottom(dense)
        tables = zip(self.tables, looked_up, strict=True)
        together = torch.stack([x, *(table(rows) for table, rows in tables)], 1)
        i, j = torch.tril_indices(9, 9, -1)
        products = torch.bmm(together, together.transpose(1, 2))[:, i, j]
        return self.top(torch.cat([x, products], 1))  # type: ignore[no-any-return]


def encoder() -> Workload:
    """Return PyTorch's own encoder, which drops out."""
    layers = [nn.TransformerEncoderLayer(WIDTH, 4, 256, 0.1, batch_first=True) for _ in range(3)]
    x = torch.randn(4, LENGTH, WIDTH)
    return Workload(nn.Sequential(*layers), lambda it: it(x).square().mean())


def graph() -> Workload:
    source, target = torch.randint(0, 500, (2, 3000))
    return of_classes(Graph(), torch.randn(500, WIDTH), source, target)


MODELS: dict[str, Make] = {
    "liger": liger,
    "float8": float8,
    "vit": lambda: patches(is_conditioned=False),
    "convnext": convnext,
    "diffusion transformer": lambda: patches(is_conditioned=True),
    "U-Net": lambda: of_classes(UNet(), torch.randn(4, 3, 32, 32)),
    "ResNet": residual,
    "LSTM": lambda: of_classes(Recurrent(), torch.randint(0, WORDS, (4, LENGTH))),
    "graph attention": graph,
    "ranking": lambda: of_classes(
        Ranking(), torch.randn(512, 13), torch.randint(0, 1000, (8, 512))
    ),
    "encoder": encoder,
    "T5": of_transformers(
        "T5ForConditionalGeneration",
        "T5Config",
        **_SEQUENCES,
        d_ff=256,
        num_layers=3,
        num_heads=4,
        d_kv=16,
        decoder_start_token_id=0,
        pad_token_id=0,
    ),
    "Whisper": of_transformers(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        **_SEQUENCES,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
        max_source_positions=150,
        max_target_positions=LENGTH,
        decoder_start_token_id=1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "Mixtral": of_transformers(
        "MixtralForCausalLM", "MixtralConfig", num_local_experts=4, **_DECODER
    ),
    "Gemma": of_transformers("Gemma2ForCausalLM", "Gemma2Config", head_dim=16, **_DECODER),
    "Mamba": of_transformers(
        "MambaForCausalLM",
        "MambaConfig",
        vocab_size=WORDS,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        use_cache=False,
    ),
}
