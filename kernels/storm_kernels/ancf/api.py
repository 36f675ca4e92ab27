"""`encode` and `decode` for tensors, on the backend that fits the device.

They are lossless unless `tolerance` is above 0. All backends write the same bytes, so the choice of
backend never changes a result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypedDict, cast

import numpy as np

from ..backends import BackendName, resolve
from ..errors import UsageError
from ..registry import implementation
from .blob import Blob
from .dtypes import DType, dtype_of
from .lossy import quantize
from .options import parse_mode
from .plan import max_encoded_bytes

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

__all__ = ["HostBackend", "decode", "encode", "host_backend"]

_CENTRES = {"conservative": 126, "adaptive": 254, "aggressive": 510}  # and zero


class _Options(TypedDict):
    """The options of every backend's encoder."""

    mode: str
    speed: str
    checksum: bool
    policy: str


class HostBackend(Protocol):
    """The low-level functions on host addresses, documented in reference.py."""

    def encode_into(
        self,
        src: int,
        nbytes: int,
        dtype: DType,
        dst: int,
        dst_bytes: int,
        *,
        mode: str = "auto",
        speed: str = "fast",
        checksum: bool = True,
        policy: str = "adaptive",
        threads: int = 1,
    ) -> int:
        """Encode to `dst` and return the blob's size."""

    def decode_into(
        self, blob: int, blob_bytes: int, dst: int, dst_bytes: int, *, threads: int = 1
    ) -> None:
        """Decode to `dst` or raise CorruptBlob."""

    def copy_checksum(self, src: int, dst: int, nbytes: int) -> int:
        """Copy `nbytes` bytes and return their checksum."""


def host_backend(name: str = "auto") -> HostBackend:
    """Return the named backend for host memory: "cpu", "numpy", or "auto" for the faster one."""
    found = resolve(name, "cpu")
    if found == "cuda":
        raise UsageError("backend 'cuda' has no functions for host memory; choose 'cpu' or 'auto'")
    return cast("HostBackend", implementation("ancf", found))


def encode(
    tensor: torch.Tensor,
    mode: str = "auto",
    speed: str = "fast",
    tolerance: float = 0.0,
    backend: str = "auto",
    *,
    checksum: bool = True,
    policy: str = "adaptive",
    threads: int = 1,
) -> Blob:
    """Return `tensor` encoded: any shape and strides, any type of `DType`, on the CPU or CUDA.

    `mode` is "auto" or a name of `Mode` in lower case. `speed` is "fast" or "dense". `policy`
    sets the dictionary size of mode "values": "conservative", "adaptive" or "aggressive".
    `threads` is for the C backend.

    With `tolerance` above 0, decoded elements may differ from the original by at most `tolerance`,
    for complex elements as a distance in the plane. NaNs and infinities remain exact. This needs
    floating point and mode "values" or "auto". "auto" returns the smaller of the blob of mode
    "values" and the lossless blob.

    Raises UsageError for arguments that no backend accepts, BackendUnavailable for a missing
    backend. If a mode does not pay for this data, the blob has mode "raw".
    """
    parse_mode(mode, speed, policy)  # raises for an unknown name before any work
    _check_source(tensor)
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
    _check_address(flat)
    options = _Options(mode=mode, speed=speed, checksum=checksum, policy=policy)
    if not tolerance:
        return _encode(flat, options, backend, threads)
    rounded = quantize(flat, mode, tolerance, _CENTRES[policy])
    lossy = _encode(rounded, {**options, "mode": "values"}, backend, threads)
    if mode == "values":
        return lossy
    return min(lossy, _encode(flat, options, backend, threads), key=lambda blob: blob.nbytes)


def decode(
    blob: Blob,
    out: torch.Tensor | None = None,
    device: torch.device | str | None = None,
    backend: str = "auto",
    *,
    threads: int = 1,
) -> torch.Tensor:
    """Return the tensor that `blob` holds, in `out` if given.

    `out` must have the blob's shape and dtype, with any strides. Without `out` the function
    allocates a tensor, on `device` or on the device of the encoded tensor. Raises CorruptBlob for a
    damaged blob; `out` may then hold arbitrary values. Raises UsageError if `out` does not match.
    For autograd, `out` is modified in place: a backward pass that needs its old values raises.
    """
    import torch

    if not isinstance(blob, Blob):
        raise UsageError(f"a {type(blob).__name__} is no Blob; Blob.from_bytes reads a stored one")
    if out is not None:
        _check_output(blob, out, device)
    target = out.device if out is not None else torch.device(device or blob.device)
    _check_memory(target)
    if out is not None and out.is_contiguous() and not _is_lazy(out):
        result = _to_be_written(out)
    else:
        result = torch.empty(blob.shape, dtype=blob.dtype, device=target)
    _check_address(result)
    _decode_to(blob, result, resolve(backend, target.type), threads)
    if out is None:
        return result
    if result.data_ptr() != out.data_ptr():
        out.detach().copy_(result)
    return out


def _to_be_written(out: torch.Tensor) -> torch.Tensor:
    """Return `out` detached for writing by address, which autograd cannot see; bump its version."""
    import torch

    if not out.is_inference():
        torch.autograd.graph.increment_version(out)
    return out.detach()


def _is_lazy(tensor: torch.Tensor) -> bool:
    """Return whether the memory's bits differ from the values (conjugate or negated views)."""
    return tensor.is_conj() or tensor.is_neg()


def _check_source(tensor: torch.Tensor) -> None:
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise UsageError(
            f"a {type(tensor).__name__} is no torch tensor; torch.as_tensor makes one of most data"
        )
    if tensor.layout is not torch.strided or tensor.is_nested:
        layout = "nested ones" if tensor.is_nested else tensor.layout
        raise UsageError(
            f"ANCF encodes strided tensors, not {layout}; "
            "encode the tensors that hold its values and indices, or to_dense()"
        )
    _check_memory(tensor.device)


def _check_memory(device: torch.device) -> None:
    if device.type == "meta":
        raise UsageError("tensors on 'meta' hold no data; give one on a CPU or CUDA device")


def _check_address(tensor: torch.Tensor) -> None:
    """Raise UsageError for a tensor that has no elements at its address.

    Wrappers such as DTensor and FakeTensor report a CPU or CUDA device, but their address is 0. To
    read or write there would crash the process.
    """
    if tensor.nbytes and not _has_address(tensor):
        raise UsageError(
            f"a {type(tensor).__name__} of shape {tuple(tensor.shape)} has no memory of its own; "
            "give the tensor that it stands for, as DTensor.to_local() does"
        )


def _has_address(tensor: torch.Tensor) -> bool:
    try:
        storage = tensor.untyped_storage()
        return storage.device.type != "meta" and storage.data_ptr() != 0
    except RuntimeError:  # PyTorch raises this for wrappers, and under torch.func's transforms
        return False


def _check_output(blob: Blob, out: torch.Tensor, device: torch.device | str | None) -> None:
    import torch

    if not isinstance(out, torch.Tensor):
        raise UsageError(f"out is a {type(out).__name__}; give a tensor, or None for a new one")
    if tuple(out.shape) != blob.shape or out.dtype != blob.dtype:
        raise UsageError(
            f"out has shape {tuple(out.shape)} and {out.dtype}, "
            f"the blob {blob.shape} and {blob.dtype}"
        )
    if device is not None and torch.device(device) != out.device:
        raise UsageError(f"out is on {out.device}, device says {device}; give one of them")


def _encode(flat: torch.Tensor, options: _Options, backend: str, threads: int) -> Blob:
    name, dtype = resolve(backend, flat.device.type), dtype_of(flat.dtype)
    data: NDArray[np.uint8] | torch.Tensor
    if name == "cuda":
        data = _encode_on_device(flat, dtype, options)
    else:
        data = _encode_on_host(flat.cpu(), dtype, name, threads, options)
    return Blob(data, tuple(flat.shape), str(flat.device))


def _encode_on_host(
    flat: torch.Tensor, dtype: DType, backend: BackendName, threads: int, options: _Options
) -> NDArray[np.uint8]:
    # If pages are small, new memory costs more than the codec. Unwritten memory gets no pages, and
    # `resize` frees it in place without a copy.
    buffer = np.empty(max_encoded_bytes(flat.nbytes, dtype), np.uint8)
    size = host_backend(backend).encode_into(
        flat.data_ptr(),
        flat.nbytes,
        dtype,
        buffer.ctypes.data,
        buffer.size,
        threads=threads,
        **options,
    )
    buffer.resize(size, refcheck=False)
    return buffer


def _encode_on_device(flat: torch.Tensor, dtype: DType, options: _Options) -> torch.Tensor:
    if not flat.is_cuda:
        raise UsageError(f"backend 'cuda' was asked to encode a tensor on {flat.device}")
    from . import cuda

    blob: torch.Tensor = cuda.encode_device(
        flat.data_ptr(), flat.nbytes, dtype, flat.get_device(), **options
    )
    return blob


def _decode_to(blob: Blob, result: torch.Tensor, backend: BackendName, threads: int) -> None:
    if backend == "cuda":
        _decode_on_device(blob, result)
        return
    import torch

    host = result if result.device.type == "cpu" else torch.empty_like(result, device="cpu")
    data = blob.host_data()
    host_backend(backend).decode_into(
        data.ctypes.data, data.size, host.data_ptr(), host.nbytes, threads=threads
    )
    if host is not result:
        result.copy_(host)


def _decode_on_device(blob: Blob, result: torch.Tensor) -> None:
    import torch

    if not result.is_cuda:
        raise UsageError(f"backend 'cuda' was asked to decode to {result.device}")
    from . import cuda

    data = blob.data if isinstance(blob.data, torch.Tensor) else torch.tensor(blob.data)
    cuda.decode_device(data.to(result.device), result.data_ptr(), result.nbytes)
