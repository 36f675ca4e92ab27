"""`TernaryTensor`: two planes with a shape and optional scales per row or group."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..errors import CorruptBlob, UsageError
from . import blob
from .api import checked_scale, decode, encode, matmul, matvec, pack, unpack
from .arrays import as_given, bytes_of, device_type, is_tensor
from .planes import ROW_ALIGN, Array, Shape, group_count, row_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["TernaryTensor"]

ABSMEAN: Final = "absmean"


@dataclass(frozen=True, eq=False)
class TernaryTensor:
    """Ternary values of any shape, in a sixteenth of float32's memory; products use them directly.

    `bit0` and `bit1` are planes (..., bytes of a row), NumPy arrays or torch tensors of uint8.
    `scale`, float32 (rows, groups), multiplies the values: one number per row (last dimension), or
    per `group` columns of a row.

    Raises UsageError if the parts do not match. Pairs of bits are checked when they are decoded or
    multiplied on the host, and by `check`.
    """

    bit0: Array
    bit1: Array
    shape: Shape
    scale: Array | None = None
    group: int | None = None

    def __post_init__(self) -> None:
        """Check the parts and convert them to their canonical form."""
        shape = tuple(int(one) for one in self.shape)
        if not shape or min(shape) < 0:
            raise UsageError(f"shape is {self.shape}; give at least one dimension")
        wanted = (*shape[:-1], row_bytes(shape[-1]))
        place = "cuda" if device_type(self.bit0) == "cuda" else "numpy"
        for name in ("bit0", "bit1"):
            plane = bytes_of(getattr(self, name), place, name)
            if tuple(plane.shape) != wanted:
                raise UsageError(f"{name} has shape {tuple(plane.shape)}; {shape} takes {wanted}")
            object.__setattr__(self, name, as_given(plane, getattr(self, name)))
        matrix = math.prod(shape[:-1]), shape[-1]
        scale, _ = checked_scale(self.scale, self.group, matrix, place, self.bit0)
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "scale", None if scale is None else as_given(scale, self.bit0))

    @classmethod
    def encode(cls, values: Array, *, backend: str = "auto") -> TernaryTensor:
        """Return a tensor of values -1, 0 and 1; UsageError names the first other value."""
        array = values if is_tensor(values) else np.asarray(values)
        return cls(*encode(array, backend=backend), tuple(array.shape))

    @classmethod
    def from_float(
        cls,
        values: Array,
        threshold: float | str = ABSMEAN,
        *,
        group: int | None = None,
        backend: str = "auto",
    ) -> TernaryTensor:
        """Return `values` rounded to -1, 0 and 1 times a scale for each row, or `group` columns.

        Values beyond +-threshold keep their sign, the others become 0. "absmean" is half the mean
        of all absolute values. It rounds values, divided by that mean, to the nearest of -1, 0 and
        1 (Ma et al., "The Era of 1-bit LLMs", 2024). The scale is the mean absolute value of the
        values in its group that do not become 0; for these signs it minimises the squared error.

        Raises UsageError for NaN, infinities and a bad threshold.
        """
        array = _floats(values)
        if isinstance(threshold, str):
            if threshold != ABSMEAN:
                raise UsageError(f"threshold is {threshold!r}; give a number or {ABSMEAN!r}")
            threshold = 0.5 * float(abs(array).mean()) if math.prod(array.shape) else 0.0
        if not math.isfinite(float(abs(array).max()) if math.prod(array.shape) else 0.0):
            raise UsageError("values holds NaN or an infinity, which no scale brings back")
        bit0, bit1 = encode(array, threshold, backend=backend)
        shape = tuple(int(one) for one in array.shape)
        return cls(bit0, bit1, shape, _scales(array, threshold, group), group)

    @property
    def planes(self) -> tuple[Array, Array]:
        """The planes bit0 and bit1."""
        return self.bit0, self.bit1

    @property
    def nbytes(self) -> int:
        """Bytes of planes and scales."""
        scale = 0 if self.scale is None else self.scale.nbytes
        return int(self.bit0.nbytes + self.bit1.nbytes + scale)

    def check(self) -> None:
        """Raise CorruptBlob if a pair of bits is invalid; waits for a CUDA device."""
        self.decode()

    def decode(self, dtype: Any = None, *, backend: str = "auto") -> Array:
        """Return the values without scales, as int8 or `dtype`; raises CorruptBlob."""
        return decode(self.bit0, self.bit1, self.shape, dtype, backend=backend)

    def to_float(self, *, backend: str = "auto") -> Array:
        """Return the values times their scales, as float32; raises CorruptBlob."""
        dtype: Any = np.float32
        if is_tensor(self.bit0):
            import torch

            dtype = torch.float32
        values = self.decode(dtype, backend=backend)
        if self.scale is None:
            return values
        rows, columns = math.prod(self.shape[:-1]), self.shape[-1]
        repeats = min(self.group or columns, columns)
        wide = (
            self.scale.repeat_interleave(repeats, 1)
            if is_tensor(self.scale)
            else np.repeat(self.scale, repeats, axis=1)
        )
        return (values.reshape((rows, columns)) * wide[:, :columns]).reshape(self.shape)

    def matvec(self, x: Any, *, threads: int = 1, backend: str = "auto") -> Array:
        """Return self @ x for a vector; see `storm_kernels.ternary.matvec`."""
        planes = self._matrix(x)
        return matvec(
            *planes, x, scale=self.scale, group=self.group, threads=threads, backend=backend
        )

    def matmul(self, x: Any, *, threads: int = 1, backend: str = "auto") -> Array:
        """Return x @ self.T for x of (..., columns); see `storm_kernels.ternary.matmul`."""
        planes = self._matrix(x)
        return matmul(
            *planes, x, scale=self.scale, group=self.group, threads=threads, backend=backend
        )

    def to(self, device: Any) -> TernaryTensor:
        """Return the tensor on a torch device; planes already on it are shared, not copied."""
        import torch

        def moved(array: Array) -> Any:
            return torch.as_tensor(array).to(device)

        scale = None if self.scale is None else moved(self.scale)
        return TernaryTensor(moved(self.bit0), moved(self.bit1), self.shape, scale, self.group)

    def numpy(self) -> TernaryTensor:
        """Return the tensor with NumPy arrays; memory on the host is shared."""

        def host(array: Array) -> NDArray[Any]:
            found: NDArray[Any] = array.cpu().numpy() if is_tensor(array) else array
            return found

        scale = None if self.scale is None else host(self.scale)
        return TernaryTensor(host(self.bit0), host(self.bit1), self.shape, scale, self.group)

    def to_bytes(self, *, packed: bool = False) -> bytes:
        """Return the tensor as self-describing bytes with a checksum (blob.py has their layout).

        By default they contain the planes, 2 bits per value; with `packed`, 1.6 bits per value.
        Raises CorruptBlob if `packed` and a pair of bits is invalid.
        """
        host = self.numpy()
        scale = None if host.scale is None else host.scale.tobytes()
        payload = b"".join((host.bit0.tobytes(), host.bit1.tobytes()))
        if packed:
            payload = _packed(host).tobytes()
        form = blob.PACKED if packed else blob.PLANES
        return blob.join(blob.Parts(form, self.shape, self.group or 0, scale, payload))

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> TernaryTensor:
        """Return the tensor that `to_bytes` stored, with NumPy arrays.

        Planes that are not packed are not copied: they are views of `data`, and writable if `data`
        is.

        Raises CorruptBlob unless `data` is a complete, undamaged tensor.
        """
        parts = blob.split(data)
        rows, columns = math.prod(parts.shape[:-1]), parts.shape[-1]
        group = parts.group or None
        scale = None
        if parts.scale is not None:
            flat = np.frombuffer(bytes(parts.scale), "<f4")
            scale = flat.reshape(rows, group_count(columns, parts.group))
        payload = np.frombuffer(parts.payload, np.uint8)
        if parts.form == blob.PACKED:
            planes = _unpacked(payload, rows, columns)
        else:
            planes = payload[: payload.size // 2], payload[payload.size // 2 :]
            _check_planes(*planes, rows, columns)
        shape = (*parts.shape[:-1], row_bytes(columns))
        return cls(planes[0].reshape(shape), planes[1].reshape(shape), parts.shape, scale, group)

    def _matrix(self, x: Any) -> tuple[Array, Array]:
        """Return the planes as a matrix for a product with `x`, which must have as many columns.

        For an `x` of two planes the columns are not checked, since rows of planes are padded.
        """
        if len(self.shape) != 2:
            raise UsageError(f"a tensor of shape {self.shape} is no matrix of (rows, columns)")
        shape = () if isinstance(x, tuple) else tuple(np.shape(x))
        if shape and shape[-1] != self.shape[1]:
            raise UsageError(f"x has shape {shape}; give (..., {self.shape[1]})")
        return self.bit0, self.bit1


# --- helpers ------------------------------------------------------------------------------------


def _floats(values: Array) -> Array:
    if is_tensor(values):
        return values.detach().float()
    return np.asarray(values, dtype=np.float32)


def _scales(values: Array, threshold: float, group: int | None) -> Array:
    """Return the mean absolute value beyond the threshold, (rows, groups); 0 if there is none."""
    rows, columns = math.prod(values.shape[:-1]), values.shape[-1]
    step = min(group or columns, columns)
    width = group_count(columns, group or 0)
    sizes = abs(values.reshape((rows, columns)))
    limit = float(np.float32(threshold))
    if is_tensor(values):
        import torch

        kept = torch.where(sizes > limit, sizes, 0.0)
        kept = torch.nn.functional.pad(kept, (0, width * step - columns))
        kept = kept.reshape(rows, width, step)
        return kept.sum(-1) / (kept > 0).sum(-1).clamp(min=1)
    some = np.where(sizes > limit, sizes, np.float32(0))
    some = np.pad(some, ((0, 0), (0, width * step - columns))).reshape(rows, width, step)
    return (some.sum(-1) / np.maximum((some > 0).sum(-1), 1)).astype(np.float32)


def _packed(tensor: TernaryTensor) -> NDArray[np.uint8]:
    """Return all values as one packed row; planes with rows of whole words need no re-encoding."""
    count = math.prod(tensor.shape)
    planes = tensor.planes
    if tensor.shape[-1] % (8 * ROW_ALIGN):
        planes = encode(tensor.decode().reshape(-1))
    packed: NDArray[np.uint8] = pack(planes[0].reshape(-1), planes[1].reshape(-1), count)
    return packed


def _unpacked(
    payload: NDArray[np.uint8], rows: int, columns: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    planes: tuple[NDArray[np.uint8], NDArray[np.uint8]] = unpack(payload, rows * columns)
    if columns % (8 * ROW_ALIGN) == 0:
        return planes
    return encode(decode(*planes, rows * columns).reshape(rows, columns))


def _check_planes(
    bit0: NDArray[np.uint8], bit1: NDArray[np.uint8], rows: int, columns: int
) -> None:
    """Raise CorruptBlob for an invalid pair, or for bits after a row's last column."""
    whole0 = bit0.reshape(rows, row_bytes(columns))
    if (bit1 & ~bit0).any():
        raise CorruptBlob("the planes hold bit0 = 0 with bit1 = 1, which stands for no value")
    tail = whole0[:, columns // 8 :].copy()
    if tail.size:
        tail[:, 0] &= np.uint8(0xFF << columns % 8 & 0xFF)
    if tail.any():
        raise CorruptBlob(f"the planes hold values behind column {columns}")
