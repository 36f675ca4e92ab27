"""The gated MLP of Llama and similar models, whose activations are encoded when computed.

On a device of compute capability 9.0, in bfloat16 or float16, one kernel computes both products.
It writes their gated product, and the tensors for the backward pass as ANCF blobs. Elsewhere the
layer uses PyTorch's own operations and has their results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import UsageError
from ..gemm import hopper
from ..gemm.activations import activate, check_activation
from ..gemm.products import Hint, gated_layer

__all__ = ["Difference", "GatedMLP"]

_SAMPLED_ROWS: Final = 256
_SEED: Final = 46

_PROJECTIONS: Final = (
    ("gate_proj", "up_proj", "down_proj"),
    ("gate", "up", "down"),
    ("w1", "w3", "w2"),
)
"""Names of gate, up and down in transformers' Llama, in GPTs with SwiGLU and in Meta's Llama."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference between a `GatedMLP` and the PyTorch operations it replaces, on one input.

    Attributes:
        fused: whether the kernel ran; if it did not, the results are PyTorch's.
        largest: the largest absolute difference between elements of the outputs.
        relative: the norm of the difference divided by the norm of PyTorch's output.
        expected: the same relative difference between PyTorch's output and that of float32
            products.
    """

    fused: bool
    largest: float
    relative: float
    expected: float

    def __str__(self) -> str:
        if not self.fused:
            return "PyTorch's own operations: no difference"
        return (
            f"relative difference {self.relative:.2e}, largest {self.largest:.2e}; PyTorch's own "
            f"output is {self.expected:.2e} from float32 products"
        )


class GatedMLP(nn.Module):
    """y = W_down (activation(W_gate x) * (W_up x)), without biases.

    `width` is the width of x and y, `hidden` that of the layer between. `activation` is "silu",
    "gelu", "gelu_tanh" or "relu". The parameters are those of three `nn.Linear`: gate_proj, up_proj
    and down_proj. The fused kernel adds in its own fixed order: its results are deterministic, and
    close to PyTorch's but not equal. With the fused kernel, hooks on the three projections are not
    called.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        activation: str = "silu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_activation(activation)
        super().__init__()
        made: dict[str, Any] = {"bias": False, "device": device, "dtype": dtype}
        self.activation = activation
        self.gate_proj = nn.Linear(width, hidden, **made)
        self.up_proj = nn.Linear(width, hidden, **made)
        self.down_proj = nn.Linear(hidden, width, **made)
        self._hint = Hint()

    @classmethod
    def from_module(cls, module: nn.Module, activation: str | None = None) -> GatedMLP:
        """Return a layer with the projections of `module`: the same parameters, not copies.

        `module` has three `nn.Linear` without bias named gate_proj, up_proj and down_proj (Llama,
        Mistral, Qwen, Gemma), or gate, up and down, or w1, w3 and w2. `activation` defaults to that
        of `module.act_fn`, or to "silu" if there is none. `difference` reports how much the results
        differ.

        Raises UsageError if `module` has no such projections, if they are not plain linear layers,
        or if the activation is unknown here.
        """
        gate, up, down = _projections(module)
        name = activation or _activation_of(module)
        check_activation(name)
        made = cls(gate.in_features, gate.out_features, activation=name, device="meta")
        made.gate_proj, made.up_proj, made.down_proj = gate, up, down
        made.train(module.training)
        return made

    def forward(self, x: Tensor) -> Tensor:
        """Return y for x, both (..., width)."""
        x, gate, up, down = _cast(
            x, self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight
        )
        if self._is_fused(x, gate, up, down):
            return gated_layer(x, gate, up, down, self.activation, self._hint)
        return self._separately(x)

    @torch.no_grad()
    def difference(self, x: Tensor | None = None) -> Difference:
        """Return the difference between this layer's output and that of PyTorch's operations.

        x is (..., width), by default 256 rows of N(0, 1).
        """
        weight = self.gate_proj.weight
        if x is None:
            generator = torch.Generator(weight.device).manual_seed(_SEED)
            x = torch.randn(
                _SAMPLED_ROWS, weight.shape[1], generator=generator, device=weight.device
            ).to(weight.dtype)
        found, expected = self(x).float(), self._separately(x).float()
        gate, up, down = (
            layer.weight.float() for layer in (self.gate_proj, self.up_proj, self.down_proj)
        )
        h = activate(self.activation, functional.linear(x.float(), gate))
        exact = functional.linear(h * functional.linear(x.float(), up), down)
        weights = (gate.to(x.dtype), up.to(x.dtype), down.to(x.dtype))
        return Difference(
            self._is_fused(x, *weights),
            float((found - expected).abs().max()),
            float((found - expected).norm() / expected.norm()),
            float((expected - exact).norm() / exact.norm()),
        )

    def extra_repr(self) -> str:
        """Return the text that `print` shows besides the submodules."""
        return f"activation={self.activation!r}"

    def _is_fused(self, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> bool:
        return down.dtype == x.dtype and hopper.takes(x, (gate, up))

    def _separately(self, x: Tensor) -> Tensor:
        h = activate(self.activation, self.gate_proj(x)) * self.up_proj(x)
        y: Tensor = self.down_proj(h)
        return y


def _cast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in the dtype that autocast would use for a matrix product."""
    kind = tensors[0].device.type
    if kind != "cuda" or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(one.to(dtype) if one.dtype == torch.float32 else one for one in tensors)


def _projections(module: nn.Module) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
    for names in _PROJECTIONS:
        found = [getattr(module, name, None) for name in names]
        if all(found):
            break
    else:
        known = "; ".join(", ".join(names) for names in _PROJECTIONS)
        raise UsageError(f"a {type(module).__name__} has no gated projections: {known}")
    for name, layer in zip(names, found, strict=True):
        if type(layer) is not nn.Linear or layer.bias is not None:
            raise UsageError(
                f"{name} is {layer}; give an nn.Linear without bias, or leave this MLP as it is"
            )
    gate, up, down = found
    return gate, up, down  # type: ignore[return-value]  # seen to be nn.Linear


def _activation_of(module: nn.Module) -> str:
    function = getattr(module, "act_fn", None)
    if function is None:
        return "silu"
    name = type(function).__name__
    if isinstance(function, nn.GELU):
        return "gelu_tanh" if function.approximate == "tanh" else "gelu"
    known = {
        "SiLU": "silu",
        "SiLUActivation": "silu",
        "ReLU": "relu",
        "GELUTanh": "gelu_tanh",
        "PytorchGELUTanh": "gelu_tanh",
        "GELUActivation": "gelu",
    }
    if name not in known:
        raise UsageError(f"act_fn {name} is unknown here; name an activation")
    return known[name]
