"""`TernaryLinear`: a linear layer with weights of -1, 0 and 1 times a scale."""

from __future__ import annotations

import math
from typing import Any, Final, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn

from ...errors import UsageError
from ..planes import group_count, row_bytes
from ..tensor import TernaryTensor
from .rounding import TernaryProduct, rounded_rows, rounded_signs

__all__ = ["Activations", "TernaryLinear"]

Activations: TypeAlias = Literal["float", "int8", "ternary"]

ACTIVATIONS: Final = ("float", "int8", "ternary")
INT8_MOST: Final = 127


class TernaryLinear(nn.Module):
    """y = x @ (w * scale).T + bias, with w of -1, 0 and 1.

    A new layer has latent weights of full precision. It rounds them in every forward pass and
    trains them by the straight-through estimator. `freeze` replaces them by two bit planes, on
    which the layer then computes. They are not trained; gradients of x pass through them. A frozen
    layer moves between devices and in state dicts like any other layer.

    `activations` says how x is rounded. "float" does not round. "int8" rounds each row to 255
    levels of its largest absolute value. "ternary" rounds each row to the signs of values beyond
    half its mean absolute value; training then saves two bits per value of x for the backward pass.
    `group` columns of w, a multiple of 32, share a scale; without `group` each row has one.
    """

    bit0: Tensor | None
    bit1: Tensor | None
    scale: Tensor | None
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        activations: Activations = "float",
        group: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make a trainable layer."""
        super().__init__()
        if activations not in ACTIVATIONS:
            raise UsageError(f"activations is {activations!r}; choose one of {ACTIVATIONS}")
        self.in_features = in_features
        self.out_features = out_features
        self.activations = activations
        self.group = group
        for name in ("bit0", "bit1", "scale"):
            self.register_buffer(name, None)
        self.weight = nn.Parameter(
            torch.empty((out_features, in_features), device=device, dtype=dtype)
        )
        self.bias = None
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))
        self.reset_parameters()

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        threshold: float | str = "absmean",
        activations: Activations = "float",
        group: int | None = None,
    ) -> TernaryLinear:
        """Return a frozen layer with a linear layer's weights, rounded by `from_float`."""
        layer = cls(
            linear.in_features, linear.out_features, linear.bias is not None,
            activations=activations, group=group, device="meta",
        )  # fmt: skip
        if linear.bias is not None:
            layer.bias = nn.Parameter(linear.bias.detach().clone(), linear.bias.requires_grad)
        layer._keep(TernaryTensor.from_float(linear.weight, threshold, group=group))
        return layer.train(linear.training)

    @classmethod
    def empty(
        cls,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        activations: Activations = "float",
        group: int | None = None,
        device: torch.device | str | None = None,
    ) -> TernaryLinear:
        """Return a frozen layer with zero weights, to be loaded later, as from a state dict."""
        layer = cls(
            in_features, out_features, bias, activations=activations, group=group, device="meta"
        )
        shape = out_features, row_bytes(in_features)
        layer.weight = None
        layer.bit0 = torch.zeros(shape, dtype=torch.uint8, device=device)
        layer.bit1 = torch.zeros(shape, dtype=torch.uint8, device=device)
        layer.scale = torch.zeros(out_features, group_count(in_features, group or 0), device=device)
        if bias:
            layer.bias = nn.Parameter(torch.zeros(out_features, device=device))
        return layer

    @property
    def frozen(self) -> bool:
        """Whether the layer has planes and no latent weights."""
        return self.weight is None

    @property
    def tensor(self) -> TernaryTensor:
        """The weights as a ternary tensor; for a frozen layer it shares the planes."""
        shape = (self.out_features, self.in_features)
        if self.weight is None:
            return TernaryTensor(self.bit0, self.bit1, shape, self.scale, self.group)
        return TernaryTensor.from_float(self.weight, group=self.group)

    def freeze(self) -> TernaryLinear:
        """Replace latent weights by planes, for inference; return the layer. Idempotent."""
        if self.weight is not None:
            self._keep(self.tensor)
        return self

    def reset_parameters(self) -> None:
        """Initialise latent weights as in torch.nn.Linear, and the bias as zeros, unless frozen."""
        if self.weight is None:
            return
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., out_features) for x of (..., in_features), in x's dtype.

        Raises UsageError if x has another last dimension.
        """
        if x.shape[-1:] != (self.in_features,):
            raise UsageError(f"x has shape {tuple(x.shape)}; give (..., {self.in_features})")
        flat = x.reshape(-1, self.in_features)
        y = self._trained(flat) if self.weight is not None else _frozen_product(flat, self)
        y = y.to(x.dtype)
        if self.bias is not None:
            y = y + self.bias.to(x.dtype)
        return y.reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Return the layer's parameters for `print`."""
        state = "frozen" if self.frozen else "latent weights"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, activations={self.activations!r}, group={self.group}, "
            f"{state}"
        )

    # --- helpers --------------------------------------------------------------------------------

    def _keep(self, tensor: TernaryTensor) -> None:
        self.weight = None
        self.bit0, self.bit1, self.scale = tensor.bit0, tensor.bit1, tensor.scale

    def _trained(self, x: Tensor) -> Tensor:
        weight = cast("Tensor", self.weight)
        if self.activations == "ternary":
            return _product(x, weight, self.group)
        signs, scale = rounded_rows(weight, self.group)
        wide = scale.repeat_interleave(self.group or max(1, self.in_features), 1)
        rounded = (signs.float() * wide[:, : self.in_features]).to(weight.dtype)
        through = weight + (rounded - weight).detach()
        if self.activations == "int8":
            levels, size = _levels(x)
            x = x + (levels.to(x.dtype) * size.to(x.dtype) - x).detach()
        return nn.functional.linear(x, through.to(x.dtype))

    def _inferred(self, x: Tensor) -> Tensor:
        threads = torch.get_num_threads()
        if self.activations == "int8":
            levels, size = _levels(x)
            return cast("Tensor", self.tensor.matmul(levels, threads=threads) * size)
        if self.activations == "ternary":
            signs, size = rounded_signs(x)
            given = TernaryTensor.encode(signs)
            return cast("Tensor", self.tensor.matmul(given, threads=threads) * size)
        if x.dtype not in {torch.float32, torch.bfloat16}:
            x = x.float()
        return cast("Tensor", self.tensor.matmul(x, threads=threads))


class _FrozenProduct(torch.autograd.Function):
    """A frozen layer's product; the gradient of x passes straight through its rounding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: TernaryLinear) -> Tensor:
        """Return the product for x of (rows, in_features)."""
        tensor = layer.tensor
        ctx.save_for_backward(*tensor.planes, tensor.scale)
        ctx.shape, ctx.group = tensor.shape, tensor.group
        return layer._inferred(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of x."""
        (gradient,) = gradients
        bit0, bit1, scale = ctx.saved_tensors
        weights = TernaryTensor(bit0, bit1, ctx.shape, scale, ctx.group).to_float()
        return gradient @ weights.to(gradient.dtype), None


def _frozen_product(x: Tensor, layer: TernaryLinear) -> Tensor:
    return cast("Tensor", _FrozenProduct.apply(x, layer))  # type: ignore[no-untyped-call]


def _product(x: Tensor, weight: Tensor, group: int | None) -> Tensor:
    return cast("Tensor", TernaryProduct.apply(x, weight, group))  # type: ignore[no-untyped-call]


def _levels(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row as integers from -127 to 127, and the value of one level, (rows, 1)."""
    wide = x.detach().float()
    size = wide.abs().amax(-1, keepdim=True) / INT8_MOST
    levels = (wide / size.clamp(min=torch.finfo(torch.float32).tiny)).round()
    return levels.to(torch.int8), size
