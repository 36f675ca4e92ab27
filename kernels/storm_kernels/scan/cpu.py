"""Scans by the C library: the same functions as in reference.py, on tensors in host memory.

Results are computed in sequence order, so the number of threads never changes the bits. It is
PyTorch's setting (`torch.set_num_threads`). Sums of float32 accumulate in float64. Each call
releases the interpreter lock.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from ..errors import BackendUnavailable, UsageError
from ..native import InstructionSet, Status, available_sets, load, probe
from .layout import Arrangement, arrange

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CpuScans", "fold", "linear", "linear_gradient", "probe"]

_DTYPES: Final = {
    torch.float64: 0,
    torch.float32: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.int64: 4,
    torch.complex64: 5,
}
"""`enum storm_scan_dtype` in scan.h."""

_OPS: Final = {"add": 0, "mul": 1, "max": 2, "min": 3, "logaddexp": 4, "compensated": 5}
"""`enum storm_scan_op` in scan.h."""


class _Shape(ctypes.Structure):
    """`struct storm_scan_shape` in scan.h."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("outer", "length", "inner"))


class _Array(ctypes.Structure):
    """`struct storm_scan_array` in scan.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("outer", "length", "inner")),
    )


class _Options(ctypes.Structure):
    """`struct storm_scan_options` in scan.h."""

    _fields_ = tuple(
        (name, ctypes.c_int32) for name in ("dtype", "op", "reverse", "exclusive", "threads", "isa")
    )


@dataclass(frozen=True)
class CpuScans:
    """The functions with a fixed instruction set.

    Methods raise BackendUnavailable when the library or the instruction set is missing.
    """

    instruction_set: InstructionSet = InstructionSet.BEST

    def fold(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        dim: int,
        *,
        op: str,
        reverse: bool,
        exclusive: bool,
        compensated: bool,
    ) -> None:
        """Convert `x` to y's type and write its scan with `op` along `dim` to `y`."""
        name = "compensated" if compensated else op
        if y.dtype in _DTYPES:
            self._call("fold", [x.to(y.dtype), y], y, dim, name, reverse, exclusive)
            return
        wide = torch.empty_like(y, dtype=torch.int64)
        narrowed = x.to(y.dtype).to(torch.int64)
        self._call("fold", [narrowed, wide], wide, dim, name, reverse, exclusive)
        y.copy_(wide)

    def linear(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        initial: torch.Tensor | None,
        h: torch.Tensor,
        dim: int,
        *,
        reverse: bool,
    ) -> None:
        """Write h_t = a_t h_(t-1) + b_t along `dim` to `h`."""
        self._call("linear", [a, b, _as_state(initial, dim), h], h, dim, "add", reverse)

    def linear_gradient(
        self,
        g: torch.Tensor,
        a: torch.Tensor,
        h: torch.Tensor,
        initial: torch.Tensor | None,
        da: torch.Tensor,
        db: torch.Tensor,
        dim: int,
        *,
        reverse: bool,
    ) -> None:
        """Write the gradients of `linear`'s a and b, given the gradient `g` of its result `h`."""
        tensors = [g, a, h, _as_state(initial, dim), da, db]
        self._call("gradient", tensors, da, dim, "add", reverse)

    def _call(
        self,
        function: str,
        tensors: Sequence[torch.Tensor | None],
        result: torch.Tensor,
        dim: int,
        op: str,
        reverse: bool,
        exclusive: bool = False,
    ) -> None:
        space = arrange(result, dim)
        placed = [None if one is None else _place(space, one) for one in tensors]
        arrays = [_array(space, one) for one in placed]
        options = _Options(
            dtype=_DTYPES[result.dtype],
            op=_OPS[op],
            reverse=reverse,
            exclusive=exclusive,
            threads=torch.get_num_threads(),
            isa=self.instruction_set,
        )
        shape = _Shape(space.outer, space.length, space.inner)
        status = getattr(load(), f"storm_scan_{function}")(
            ctypes.byref(shape), ctypes.byref(options), *(ctypes.byref(one) for one in arrays)
        )
        if status == Status.UNSUPPORTED:
            raise BackendUnavailable(
                f"{self.instruction_set.name.lower()} is missing here; "
                f"there are {', '.join(one.name.lower() for one in available_sets())}"
            )
        if status < 0:
            raise UsageError(
                f"a scan of {tuple(result.shape)} {result.dtype} along {dim}: "
                f"the library refuses the arguments ({Status(status).name})"
            )


def _as_state(initial: torch.Tensor | None, dim: int) -> torch.Tensor | None:
    return None if initial is None else initial.unsqueeze(dim)


def _place(space: Arrangement, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy with contiguous inner dimensions, which the library requires."""
    placed, strides = space.place(tensor.detach().resolve_conj().resolve_neg())
    if space.inner == 1 or strides[2] == 1:
        return placed
    return space.copy(placed)


def _array(space: Arrangement, tensor: torch.Tensor | None) -> _Array:
    if tensor is None:
        return _Array(None, 0, 0, 0)
    _, (outer, length, inner) = space.place(tensor)
    return _Array(tensor.data_ptr(), outer, length, inner)


_DEFAULT = CpuScans()
fold = _DEFAULT.fold
linear = _DEFAULT.linear
linear_gradient = _DEFAULT.linear_gradient
