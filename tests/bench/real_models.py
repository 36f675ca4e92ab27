"""Models of other people's packages, trained with offload and without: the bits must be the same.

    pip install --no-deps --target zoo diffusers x-transformers einx loguru torch-einops-utils \
        einops vit-pytorch torch_geometric torchdiffeq gpytorch linear_operator jaxtyping \
        wadler-lindig monai kornia kornia_rs denoising-diffusion-pytorch ema-pytorch
    PYTHONPATH=tests:zoo python -m bench.real_models --json tests/bench/results/real_models.json
    stormd run --mps=on -- python -m bench.real_models --device cuda

Each model does some steps with AdamW, in float32 and under autocast to bfloat16, twice without
offload, and then each way: hooks at several options, `storm.compile`, `storm.compile_step`. The
loss of every step, and all parameters and buffers at the end, are compared. What differs is named,
and the exit status is 1; a model that is not deterministic by itself, or whose package is missing,
says so. On a GPU PyTorch is told to compute deterministically. Every replay that is possible
is taken.
"""

from __future__ import annotations

import gc
import importlib
import os
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pytest
import storm_client as storm
import torch
from bench.recording import parser_of, record
from storm_client.errors import UsageError
from support.planning import replay_all
from support.training import bits
from torch import Tensor, nn

STEPS = 5
HOOKS: dict[str, dict[str, Any]] = {
    "least": {"min_bytes": 1},
    "budget": {"min_bytes": 1024, "budget": 0.4},
    "verified": {"min_bytes": 1, "verify": "always"},
}
COMPILED: dict[str, dict[str, Any]] = {
    "compile": {"min_bytes": 64, "codegen": "eager"},
    "compile least": {"min_bytes": 64, "codegen": "eager", "budget": 0.0},
}
STEP: dict[str, Any] = {"min_bytes": 64, "codegen": "eager"}
WAYS = ("hooks", "compile", "step")
MAX_CHARACTERS = 300
POOL_BYTES = 1 << 30


class Trained(NamedTuple):
    """A model, and what a step computes with it."""

    module: nn.Module
    forward: Callable[[nn.Module], Any]


Maker = Callable[[], Trained]


def _diffusers(name: str, shape: tuple[int, ...], more: dict[str, Any], **config: Any) -> Maker:
    """Return how to make a model of diffusers; `more` has what it takes beside its sample."""

    def make() -> Trained:
        model = getattr(importlib.import_module("diffusers"), name)(**config)
        sample = torch.randn(shape)
        inputs = {key: value() for key, value in more.items()}
        return Trained(model, lambda module: module(sample, **inputs).sample)

    return make


def _module_of(package: str, name: str, shape: tuple[int, ...], **config: Any) -> Maker:
    """Return how to make a module that takes one tensor."""

    def make() -> Trained:
        module = getattr(importlib.import_module(package), name)(**config)
        x = torch.randn(shape)
        return Trained(module, lambda net: net(x))

    return make


def _decoder(**config: Any) -> Maker:
    def make() -> Trained:
        package = importlib.import_module("x_transformers")
        layers = package.Decoder(dim=32, depth=3, **config)
        net = package.TransformerWrapper(num_tokens=64, max_seq_len=64, attn_layers=layers)
        tokens = torch.randint(0, 64, (2, 48))
        return Trained(net, lambda module: module(tokens))

    return make


class _Graph(nn.Module):
    """Several kinds of graph convolutions, one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        convolutions = importlib.import_module("torch_geometric.nn")
        self.layers = nn.ModuleList(
            [
                convolutions.GCNConv(16, 32),
                convolutions.GATv2Conv(32, 8, heads=4, dropout=0.1),
                convolutions.TransformerConv(32, 8, heads=4),
                convolutions.SAGEConv(32, 8),
            ]
        )

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.elu(layer(x, edges))
        return x


def _graph() -> Trained:
    x, edges = torch.randn(50, 16), torch.randint(0, 50, (2, 200))
    return Trained(_Graph(), lambda net: net(x, edges))


class _Field(nn.Module):
    """The right side of a differential equation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))

    def forward(self, _t: Tensor, y: Tensor) -> Tensor:
        out: Tensor = self.net(y**3)
        return out


def _equation() -> Trained:
    package = importlib.import_module("torchdiffeq")
    x, t = torch.randn(16, 8) / 10, torch.linspace(0, 1, 5)
    ways = (package.odeint, package.odeint_adjoint)
    return Trained(_Field(), lambda net: [way(net, x, t, method="rk4") for way in ways])


def _process() -> Trained:
    package = importlib.import_module("gpytorch")
    x = torch.linspace(0, 1, 40)
    y = torch.sin(6 * x)
    likelihood = package.likelihoods.GaussianLikelihood()

    class Exact(package.models.ExactGP):  # type: ignore[misc, name-defined]  # imported above
        def __init__(self) -> None:
            super().__init__(x, y, likelihood)
            self.mean_module = package.means.ConstantMean()
            kernel = package.kernels.RBFKernel()
            self.covar_module = package.kernels.ScaleKernel(kernel)

        def forward(self, at: Tensor) -> Any:
            mean, covariance = self.mean_module(at), self.covar_module(at)
            return package.distributions.MultivariateNormal(mean, covariance)

    net = Exact()
    marginal = package.mlls.ExactMarginalLogLikelihood(likelihood, net)
    return Trained(net, lambda module: -marginal(module(x), y))


def _diffusion() -> Trained:
    package = importlib.import_module("denoising_diffusion_pytorch")
    net = package.Unet(dim=16, dim_mults=(1, 2), flash_attn=False)
    images = torch.rand(2, 3, 16, 16)
    return Trained(
        package.GaussianDiffusion(net, image_size=16, timesteps=50), lambda module: module(images)
    )


class _Augmented(nn.Module):
    """Two convolutions, and what kornia does to their image."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
        self.angle = nn.Parameter(torch.tensor([10.0, 20.0]))

    def forward(self, x: Tensor) -> list[Tensor]:
        kornia = importlib.import_module("kornia")
        y = kornia.geometry.rotate(self.two(torch.relu_(self.one(x))), self.angle)
        y = kornia.filters.gaussian_blur2d(y, (3, 3), (1.0, 1.0)).sigmoid()
        return [kornia.color.rgb_to_lab(y), kornia.losses.ssim_loss(y, x.sigmoid(), 5)]


def _augmented() -> Trained:
    x = torch.randn(2, 3, 24, 24)
    return Trained(_Augmented(), lambda net: net(x))


def _times() -> Tensor:
    return torch.tensor([3, 7])


def _random(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(shape)


_UNET = {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8}
_JOINT = {"attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 32}

MODELS: dict[str, Maker] = {
    "diffusers UNet2D": _diffusers(
        "UNet2DModel",
        (2, 3, 16, 16),
        {"timestep": _times},
        **_UNET,
        sample_size=16,
        dropout=0.1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ),
    "diffusers UNet2DCondition": _diffusers(
        "UNet2DConditionModel",
        (2, 4, 16, 16),
        {"timestep": _times, "encoder_hidden_states": _random(2, 7, 32)},
        **_UNET,
        sample_size=16,
        cross_attention_dim=32,
        attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ),
    "diffusers AutoencoderKL": _diffusers(
        "AutoencoderKL",
        (2, 3, 32, 32),
        {"sample_posterior": lambda: True},
        **_UNET,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    ),
    "diffusers DiT": _diffusers(
        "DiTTransformer2DModel",
        (2, 4, 8, 8),
        {"timestep": _times, "class_labels": lambda: torch.tensor([1, 2])},
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        num_layers=3,
        sample_size=8,
        num_embeds_ada_norm=10,
    ),
    "diffusers SD3": _diffusers(
        "SD3Transformer2DModel",
        (2, 4, 8, 8),
        {
            "timestep": _times,
            "encoder_hidden_states": _random(2, 6, 32),
            "pooled_projections": _random(2, 32),
        },
        **_JOINT,
        sample_size=8,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        caption_projection_dim=32,
        pooled_projection_dim=32,
    ),
    "diffusers Flux": _diffusers(
        "FluxTransformer2DModel",
        (2, 16, 4),
        {
            "timestep": lambda: torch.tensor([0.3, 0.7]),
            "encoder_hidden_states": _random(2, 6, 32),
            "pooled_projections": _random(2, 32),
            "img_ids": lambda: torch.randint(0, 4, (16, 3)).float(),
            "txt_ids": lambda: torch.zeros(6, 3),
        },
        **_JOINT,
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=2,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    ),
    "x-transformers rotary": _decoder(
        heads=2, rotary_pos_emb=True, attn_qk_norm=True, ff_glu=True, attn_dropout=0.1
    ),
    "x-transformers hyper": _decoder(
        heads=4, attn_kv_heads=2, num_residual_streams=4, attn_sparse_topk=8, rel_pos_bias=True
    ),
    "x-transformers gated": _decoder(
        heads=2, alibi_pos_bias=True, ff_relu_squared=True, gate_residual=True, macaron=True
    ),
    "vit-pytorch ViT": _module_of(
        "vit_pytorch",
        "ViT",
        (2, 3, 32, 32),
        image_size=32,
        patch_size=8,
        num_classes=10,
        dim=32,
        depth=2,
        heads=2,
        mlp_dim=64,
        dropout=0.1,
    ),
    "MONAI SwinUNETR": _module_of(
        "monai.networks.nets",
        "SwinUNETR",
        (1, 1, 64, 64),
        in_channels=1,
        out_channels=2,
        feature_size=12,
        spatial_dims=2,
        use_checkpoint=True,
    ),
    "MONAI UNet": _module_of(
        "monai.networks.nets",
        "UNet",
        (1, 1, 16, 16, 16),
        spatial_dims=3,
        in_channels=1,
        out_channels=2,
        channels=(8, 16, 32),
        strides=(2, 2),
        dropout=0.1,
    ),
    "PyTorch Geometric": _graph,
    "torchdiffeq": _equation,
    "gpytorch": _process,
    "denoising-diffusion": _diffusion,
    "kornia": _augmented,
}


# --- training -------------------------------------------------------------------------------


def _tensors(out: Any) -> Iterator[Tensor]:
    """Yield the tensors of a model's output that have gradients."""
    if isinstance(out, Tensor):
        if out.requires_grad and out.is_floating_point():
            yield out
    elif isinstance(out, dict):
        yield from _tensors(list(out.values()))
    elif isinstance(out, list | tuple):
        for one in out:
            yield from _tensors(one)


def _loss(out: Any) -> Tensor:
    """Return a sum of all outputs in which each element counts otherwise."""
    total = torch.zeros(())
    for one in _tensors(out):
        weights = torch.linspace(-1, 1, one.numel(), device=one.device).view(one.shape)
        total = total.to(one.device) + (one.float() * weights).mean()
    return total


class Way(NamedTuple):
    """How a model is trained."""

    context: Callable[[nn.Module], AbstractContextManager[object]] = lambda _: nullcontext()
    wrap: Callable[[nn.Module], Any] = lambda module: module
    whole: Callable[[Callable[[], Tensor]], Callable[[], Tensor]] = lambda step: step
    """What is made of the function that does a step."""


PLAIN = Way()
TRACED = Way(wrap=lambda module: torch.compile(module, backend="aot_eager"))


def train(make: Maker, way: Way, *, half: bool, device: str, steps: int) -> list[Tensor]:
    """Train a new model; return the loss of each step, and what parameters and buffers are then."""
    torch.manual_seed(0)
    random.seed(0)
    torch._dynamo.reset()
    with torch.device(device):
        module, forward = make()
    module.to(device).train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    context, model = way.context(module), way.wrap(module)

    def step() -> Tensor:
        with context, torch.autocast(device, torch.bfloat16, enabled=half):
            loss = _loss(forward(model))
        loss.backward()  # type: ignore[no-untyped-call]  # torch's gap
        optimizer.step()
        optimizer.zero_grad()
        return loss

    whole = way.whole(step)
    found = []
    for number in range(steps):
        torch.manual_seed(100 + number)
        found.append(whole().detach().clone())
    return [*found, *(one.detach().clone() for one in (*module.parameters(), *module.buffers()))]


def _same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(
        one.shape == other.shape and torch.equal(bits(one), bits(other))
        for one, other in zip(found, expected, strict=True)
    )


def _ways(client: storm.Client, names: list[str]) -> Iterator[tuple[str, Way, Way]]:
    """Yield each way by name, with the one without offload that it has to equal."""
    if "hooks" in names:
        for name, options in HOOKS.items():
            yield f"hooks {name}", Way(context=partial(client.offload, **options)), PLAIN
    if "compile" in names:
        for name, options in COMPILED.items():
            yield name, Way(wrap=partial(storm.compile, **options)), TRACED
    if "step" in names:
        yield "step", Way(whole=partial(storm.compile_step, **STEP)), PLAIN


def compare(make: Maker, client: storm.Client, names: list[str], **how: Any) -> dict[str, str]:
    """Return what came of each way: "same", "differs", or why it was not compared.

    `how` is what `train` takes besides.
    """
    run = partial(train, make, **how)
    found: dict[str, str] = {}
    for like in (PLAIN, TRACED):
        ways = [(name, way) for name, way, other in _ways(client, names) if other is like]
        if ways:
            problem, expected = _expected(run, like)
            found |= {name: problem or _outcome(run, way, expected) for name, way in ways}
    return found


def _expected(run: Callable[[Way], list[Tensor]], way: Way) -> tuple[str, list[Tensor]]:
    """Return what training without offload gives, or why nothing can be compared with it."""
    try:
        once, again = run(way), run(way)
    except ImportError as error:
        return f"missing: {error.name}", []
    except Exception as error:  # noqa: BLE001 - it is no fault of offload's
        return f"without offload: {type(error).__name__}: {error}"[:MAX_CHARACTERS], []
    return ("" if _same(again, once) else "not deterministic without offload"), once


def _outcome(run: Callable[[Way], list[Tensor]], way: Way, expected: list[Tensor]) -> str:
    try:
        found = run(way)
    except UsageError as error:
        return f"refused: {error}".partition(" at ")[0]  # where in the package is no matter
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what is looked for
        return f"raised {type(error).__name__}: {error}"[:MAX_CHARACTERS]
    finally:
        gc.collect()
    return "same" if _same(found, expected) else "differs"


def _connected(device: str) -> storm.Client:
    """Connect to the daemon that there is; on a CPU to one of our own."""
    if device == "cuda":
        return storm.connect(timeout=60.0)
    return storm.connect(embedded="always", pool_bytes=POOL_BYTES, timeout=60.0)


def main() -> None:
    """Train what the arguments say."""
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="+", metavar="MODEL", help="(default: all there are)")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    replay_all(pytest.MonkeyPatch())
    if args.device == "cuda":
        torch.use_deterministic_algorithms(True)
    rows: dict[str, dict[str, str]] = {}
    with _connected(args.device) as client:
        os.environ["STORMD_ADDRESS"] = client.address
        for name, half in product(args.models or MODELS, (False, True)):
            how = {"half": half, "device": args.device, "steps": args.steps}
            row = compare(MODELS[name], client, args.ways, **how)
            rows[f"{name}, {'bfloat16' if half else 'float32'}"] = row
            print(f"{name}, {'bfloat16' if half else 'float32'}: {row}", flush=True)
    counts = Counter(outcome.partition(":")[0] for row in rows.values() for outcome in row.values())
    print(dict(counts))
    record(args.json, {"counts": counts, "models": rows})
    sys.exit(any(outcome.startswith(("differs", "raised")) for outcome in counts))


if __name__ == "__main__":
    main()
