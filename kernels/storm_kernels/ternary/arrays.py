"""Converts NumPy arrays and torch tensors for the backends, and results back.

This module uses torch only if the caller has loaded it: without a tensor nothing here imports it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..errors import UsageError
from .planes import Array, Kind

if TYPE_CHECKING:
    from numpy.typing import NDArray
__all__ = ["as_given", "bytes_of", "device_type", "floats_of", "is_tensor", "kind_of", "placed"]

_KINDS: Final = {
    "int8": Kind.INT8,
    "float32": Kind.FLOAT32,
    "bfloat16": Kind.BFLOAT16,
}
_CHARS: Final = {"b": Kind.INT8, "f": Kind.FLOAT32}
"""Kinds by NumPy's type codes; to read a code takes a fortieth of the time of a dtype's name."""


def is_tensor(array: Array) -> bool:
    """Return whether `array` is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def device_type(array: Array) -> str:
    """Return "cuda" for a tensor on a CUDA device, else "cpu".

    Raises:
        UsageError: the tensor has no data, or is on another kind of device.
    """
    if not is_tensor(array):
        return "cpu"
    kind = str(array.device.type)
    if kind not in {"cpu", "cuda"}:
        raise UsageError(f"a tensor on {kind!r} cannot be used; give one on a CPU or CUDA device")
    return kind


def kind_of(array: Array) -> Kind | None:
    """Return the kind of the array's values, None for a dtype that the backends do not read."""
    if type(array) is np.ndarray and array.dtype.char in _CHARS:
        return _CHARS[array.dtype.char]
    return _KINDS.get(_dtype_name(array))


def placed(array: Array, backend: str) -> Array:
    """Return the array contiguous and in the form for `backend`: a CUDA tensor, else a NumPy array.

    bfloat16 becomes uint16 in NumPy. Data that already has this form is not copied.

    Raises:
        UsageError: data on the host was given to backend "cuda".
    """
    if backend == "cuda":
        if device_type(array) != "cuda":
            raise UsageError("backend 'cuda' was given data on the host; move it to the device")
        return array.detach().contiguous()
    if is_tensor(array):
        host = array.detach().resolve_conj().resolve_neg().cpu().contiguous()
        if _dtype_name(host) == "bfloat16":
            import torch

            return host.view(torch.int16).numpy().view(np.uint16)
        return host.numpy()
    plain = np.ascontiguousarray(array)
    if plain.dtype.char in _CHARS:
        return plain
    return plain.view(np.uint16) if _dtype_name(plain) == "bfloat16" else plain


def bytes_of(array: Array, backend: str, name: str) -> Array:
    """Return a plane in the form for `backend`, as `placed` does.

    Raises:
        UsageError: the plane is not uint8, or has no dimension.
    """
    if type(array) is np.ndarray and array.dtype.char == "B" and array.flags.c_contiguous:
        if array.ndim and backend != "cuda":
            return array  # the fast path for most calls
    elif not is_tensor(array):
        array = np.asarray(array)
    if _dtype_name(array) != "uint8" or array.ndim < 1:
        raise UsageError(
            f"{name} is {_dtype_name(array)} of {array.ndim} dimensions; a plane is uint8 of at "
            "least one, as encode() returns it"
        )
    return placed(array, backend)


def floats_of(values: Array, backend: str, like: Array) -> Array:
    """Return scales as contiguous float32 in memory that the backend reads."""
    if backend == "cuda":
        import torch

        return torch.as_tensor(values, dtype=torch.float32, device=like.device).contiguous()
    if is_tensor(values):
        values = values.detach().cpu().float().numpy()
    return np.asarray(values, dtype=np.float32, order="C")


def as_given(result: NDArray[Any] | Array, like: Array) -> Array:
    """Return a backend's result; if `like` is a tensor, as a tensor on its device."""
    if not is_tensor(like) or is_tensor(result):
        return result
    import torch

    return torch.from_numpy(result).to(like.device)


def _dtype_name(array: Array) -> str:
    return str(array.dtype).removeprefix("torch.")
