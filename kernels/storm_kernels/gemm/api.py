"""`linear`, `gated_mlp` and `grad_weight`: matrix products with encoded results or inputs.

On a device of compute capability 9.0 a kernel encodes in the product's epilogue. Elsewhere, and for
shapes and dtypes that the kernel does not support, PyTorch multiplies and `ancf.encode` encodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

from ..ancf import encode as encode_tensor
from ..backends import BackendInfo
from ..backends import backends as backends_of
from ..errors import UsageError
from . import hopper
from .activations import activate, check_activation
from .encoded import Encoded, from_room

if TYPE_CHECKING:
    from torch import Tensor

    from .hopper import Codes

__all__ = ["backends", "gated_mlp", "grad_weight", "is_available", "linear"]


def backends() -> dict[str, BackendInfo]:
    """Return the backends by name, each with whether it works here or why not.

    "cuda" is the kernel that encodes in its epilogue. "cpu" is PyTorch's product (on any device)
    followed by `ancf.encode`. "numpy" is the reference that the tests compare with.
    """
    return backends_of("gemm")


def is_available() -> bool:
    """Return whether the kernel that multiplies and encodes in one pass is available here."""
    return backends()["cuda"].available


@overload
def linear(
    x: Tensor, w: Tensor, bias: Tensor | None = ..., *, encode: Literal[False] = ...
) -> Tensor: ...


@overload
def linear(
    x: Tensor, w: Tensor, bias: Tensor | None = ..., *, encode: Literal[True]
) -> tuple[Tensor, Encoded]: ...


def linear(
    x: Tensor, w: Tensor, bias: Tensor | None = None, *, encode: bool = False
) -> Tensor | tuple[Tensor, Encoded]:
    """Return y = x @ w.T + bias, with `encode` also y encoded; not differentiable.

    x is (..., k), w (n, k), bias (n) or None, all of one dtype. The kernel adds in float32, in its
    own order, which is always the same. If the kernel does not support x and w, y equals
    `torch.nn.functional.linear` bit for bit. With `encode` the call waits for the device.

    Raises UsageError if shapes or dtypes do not match.
    """
    _check(x, w)
    if bias is not None and bias.shape != w.shape[:1]:
        raise UsageError(f"bias of shape {tuple(bias.shape)} for {w.shape[0]} columns")
    if bias is not None:
        _check_dtypes(x, bias, "a bias")
    if hopper.takes(x, (w,)) and (bias is None or _fits(bias, x)):
        return _linear_on_device(x.detach(), w.detach(), bias, encode=encode)
    from torch.nn import functional

    y = functional.linear(x.detach(), w.detach(), None if bias is None else bias.detach())
    return (y, Encoded(encode_tensor(y))) if encode else y


def gated_mlp(
    x: Tensor, w_gate: Tensor, w_up: Tensor, activation: str = "silu"
) -> tuple[Tensor, Encoded, Encoded]:
    """Return h = activation(x @ w_gate.T) * (x @ w_up.T), and both products encoded.

    x is (..., k), the weights (n, k). The kernel requires bfloat16 or float16, and never writes the
    two products to memory unencoded. `activation` is "silu", "gelu", "gelu_tanh" or "relu". The
    function is not differentiable (`storm_kernels.nn.GatedMLP` is). It waits for the device, to
    learn the blobs' sizes.

    Raises UsageError if shapes or dtypes do not match, or for an unknown activation.
    """
    check_activation(activation)
    _check(x, w_gate)
    _check(x, w_up)
    if w_gate.shape != w_up.shape:
        raise UsageError(f"w_gate {tuple(w_gate.shape)}, w_up {tuple(w_up.shape)}: give one shape")
    x, w_gate, w_up = x.detach(), w_gate.detach(), w_up.detach()
    if hopper.takes(x, (w_gate, w_up)):
        first, second = hopper.windows(x, (w_gate, w_up))
        room = hopper.full_room(x, w_gate)
        h, codes = hopper.gated(x, (w_gate, w_up), activation, coded=(first, second), room=room)
        gate, up = _encoded(codes, tuple(h.shape))
        return h, gate, up
    from torch.nn import functional

    raw_gate, raw_up = functional.linear(x, w_gate), functional.linear(x, w_up)
    h = activate(activation, raw_gate) * raw_up
    return h, Encoded(encode_tensor(raw_gate)), Encoded(encode_tensor(raw_up))


def grad_weight(grad: Tensor, encoded: Encoded) -> Tensor:
    """Return the gradient of a weight, grad.T @ x, from an encoded x.

    grad is (..., n), x is (..., k) with the same rows; the result is (n, k). The function decodes
    x, then PyTorch multiplies.

    Raises UsageError if shapes do not match or x is not an `Encoded`, and CorruptBlob for a damaged
    blob.
    """
    if not isinstance(encoded, Encoded):
        raise UsageError(f"x is a {type(encoded).__name__}; give what `encode=True` has returned")
    if grad.shape[:-1] != encoded.shape[:-1] or not grad.dim():
        raise UsageError(
            f"grad of shape {tuple(grad.shape)} for x of shape {encoded.shape}; all but the last "
            "extents must be the same"
        )
    x = encoded.decode()
    return grad.reshape(-1, grad.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


def _linear_on_device(
    x: Tensor, w: Tensor, bias: Tensor | None, *, encode: bool
) -> Tensor | tuple[Tensor, Encoded]:
    if not encode:
        return hopper.product(x, w, bias)[0]
    (window,) = hopper.windows(x, (w,))
    room = hopper.full_room(x, w)
    y, codes = hopper.product(x, w, bias, window=window, room=room)
    (encoded,) = _encoded(codes, tuple(y.shape))
    return y, encoded


def _encoded(codes: Codes | None, shape: tuple[int, ...]) -> list[Encoded]:
    assert codes is not None
    return [
        from_room(room, nbytes, shape)
        for room, (nbytes, _) in zip(codes.blobs, codes.sizes.wait(), strict=True)
    ]


def _fits(bias: Tensor, x: Tensor) -> bool:
    return bias.dtype == x.dtype and bias.device == x.device and bias.is_contiguous()


def _check(x: Tensor, w: Tensor) -> None:
    if not x.dim() or w.dim() != 2 or w.shape[1] != x.shape[-1]:
        raise UsageError(
            f"x of shape {tuple(x.shape)} and a weight of shape {tuple(w.shape)}; give (..., k) "
            "and (n, k)"
        )
    _check_dtypes(x, w, "a weight")


def _check_dtypes(x: Tensor, other: Tensor, name: str) -> None:
    if x.dtype != other.dtype and not _autocasts(x):
        raise UsageError(
            f"x is {x.dtype} and {name} {other.dtype}: convert one of them, as by .to({x.dtype})"
        )


def _autocasts(x: Tensor) -> bool:
    import torch

    return bool(torch.is_autocast_enabled(x.device.type))
