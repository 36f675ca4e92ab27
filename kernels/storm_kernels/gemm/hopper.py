"""Matrix products on Hopper (compute capability 9.0) that encode their results in one pass.

`product` and `gated` launch kernels on the current stream and do not wait. They write blobs to
buffers whose size was set beforehand. After the kernels have run, `Sizes` reports whether each blob
fitted.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from ..ancf.dtypes import DType, dtype_of
from ..errors import BackendUnavailable
from . import jobs, modules
from .jobs import PANEL_COLUMNS, STEP, Variant
from .window import Window, geometry, window_of
from .window import full_room as full_room_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "TILING",
    "Codes",
    "Sizes",
    "Tiling",
    "backward",
    "full_room",
    "gated",
    "probe",
    "product",
    "takes",
    "windows",
]


@dataclass(frozen=True, slots=True)
class Tiling:
    """How tiles of 128 rows are scheduled: a `cluster` of blocks shares its reads of weights.

    `group` tiles of the same columns are processed before the next columns. One of a block's two
    warpgroups is `lead` steps of 64 products ahead of the other, at most 3.
    """

    cluster: int = 1
    group: int = 32
    lead: int = 0


TILING: Final = Tiling()
"""The default tiling of products."""

_SAMPLED_ROWS: Final = 64
_ALIGN: Final = 16  # bytes: alignment of vector copies and stores


def probe() -> tuple[bool, str]:
    """Return whether a device can run the kernels, and its name or the reason why not."""
    try:
        import torch

        import storm_kernels.cuda_driver  # noqa: F401 (missing bindings are a reason)
    except (BackendUnavailable, ImportError) as missing:
        return False, str(missing)
    if not torch.cuda.is_available():
        return False, "PyTorch sees no CUDA device"
    capability, name = torch.cuda.get_device_capability(), torch.cuda.get_device_name()
    if capability != modules.CAPABILITY:
        major, minor = capability
        return False, f"{name} has compute capability {major}.{minor}; the kernels are for 9.0"
    return True, f"{name}: wgmma and TMA, encoded in the epilogue"


def takes(x: Tensor, weights: tuple[Tensor, ...]) -> bool:
    """Return whether the kernels support x, (..., k), and the weights, each (columns, k)."""
    import torch

    if not x.is_cuda or x.dtype not in (torch.bfloat16, torch.float16) or not x.numel():
        return False
    if not _is_plain(x) or torch.cuda.get_device_capability(x.device) != modules.CAPABILITY:
        return False
    depth = x.shape[-1]
    return depth % 8 == 0 and all(_is_weight(weight, x, depth) for weight in weights)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is a plain tensor with real memory that a kernel can use."""
    import torch

    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling()


def _is_weight(weight: Tensor, x: Tensor, depth: int) -> bool:
    return (
        _is_plain(weight)
        and weight.dtype == x.dtype
        and weight.device == x.device
        and weight.dim() == 2
        and weight.shape[1] == depth
        and weight.shape[0] % PANEL_COLUMNS == 0
        and weight.is_contiguous()
        and weight.data_ptr() % _ALIGN == 0
    )


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of the blobs of one call, which a copy transfers to host memory."""

    on_host: Tensor  # (blobs, 2), int64: bytes, and whether they fitted
    arrived: Any  # torch.cuda.Event

    def wait(self) -> list[tuple[int, bool]]:
        """Wait for the kernels and the copy; return each blob's bytes and whether they fitted."""
        self.arrived.synchronize()
        return [(nbytes, bool(fits)) for nbytes, fits in self.on_host.tolist()]


@dataclass(frozen=True, slots=True)
class Codes:
    """Encoded results: for each the buffer that begins with its blob, and its window."""

    blobs: tuple[Tensor, ...]
    windows: tuple[Window, ...]
    sizes: Sizes


def windows(x: Tensor, weights: tuple[Tensor, ...]) -> tuple[Window, ...]:
    """Return windows for the products, from a sample of 64 rows; waits for the device."""
    import torch

    rows = x.reshape(-1, x.shape[-1])
    step = max(1, rows.shape[0] // _SAMPLED_ROWS)
    dtype = dtype_of(x.dtype)
    sample = rows[::step][:_SAMPLED_ROWS]
    shift, symbols = dtype.mantissa_bits, 1 << (15 - dtype.mantissa_bits)
    counts = [
        torch.bincount(
            ((sample @ weight.t()).view(torch.int16).flatten().int() >> shift) & (symbols - 1),
            minlength=symbols,
        )
        for weight in weights
    ]
    return tuple(window_of(one, dtype) for one in torch.stack(counts).tolist())


def full_room(x: Tensor, weight: Tensor) -> int:
    """Return an upper bound, in bytes, for any blob of the product x @ weight.T."""
    return full_room_of(dtype_of(x.dtype), x.numel() // x.shape[-1] * weight.shape[0])


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    window: Window | None = None,
    room: int | None = None,
    tiling: Tiling = TILING,
) -> tuple[Tensor, Codes | None]:
    """Return x @ weight.T + bias, and with a `window` also its blob."""
    coded = None if window is None else (window,)
    call = _Call(x, (weight,), "none", coded, bias=bias, room=room, tiling=tiling)
    y = call.new()
    call.job.out = y.data_ptr()
    call.multiply()
    return y.view(*x.shape[:-1], weight.shape[0]), call.codes()


def gated(
    x: Tensor,
    weights: tuple[Tensor, Tensor],
    activation: str,
    *,
    coded: tuple[Window, Window] | None = None,
    room: int | None = None,
    tiling: Tiling = TILING,
) -> tuple[Tensor, Codes | None]:
    """Return activation(x @ gate.T) * (x @ up.T), and with windows the blobs of both products.

    `room` is the buffer size of each blob in bytes (default: the `room` of its window).
    """
    call = _Call(x, weights, activation, coded, room=room, tiling=tiling)
    out = call.new()
    call.job.out = out.data_ptr()
    call.multiply()
    return out.view(*x.shape[:-1], weights[0].shape[0]), call.codes()


def backward(
    grad: Tensor, blobs: tuple[Tensor, ...], bases: tuple[int, ...], activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of gate and up, and activation(gate) * up, whose gradient is `grad`.

    `blobs` are those of gate and up that `gated` wrote with windows at `bases`. They have as many
    elements as `grad`, which is contiguous.
    """
    import torch

    dtype = dtype_of(grad.dtype)
    place = geometry(dtype, grad.numel())
    out, grad_gate, grad_up = (torch.empty_like(grad) for _ in range(3))
    encoded = [
        jobs.EncodedBlob(blob.data_ptr(), base, 0) for blob, base in zip(blobs, bases, strict=True)
    ]
    job = jobs.Backward(
        *encoded, grad.data_ptr(), out.data_ptr(), grad_gate.data_ptr(), grad_up.data_ptr(),
        grad.numel(), place.fixed_offset, place.payload_offset, place.tiles, 0,
    )  # fmt: skip
    cluster = TILING.cluster  # any value works; the forward pass loaded this module
    variant = Variant(dtype, pairs=True, encodes=True, activation=activation, cluster=cluster)
    shape = jobs.backward_blocks(place.tiles), jobs.BACKWARD_THREADS
    modules.launch(variant, "gemm_backward", shape, grad, (job,))
    return grad_gate, grad_up, out


class _Call:
    """One product or pair of products: its memory, its arguments and its launches."""

    def __init__(
        self,
        x: Tensor,
        weights: tuple[Tensor, ...],
        activation: str,
        coded: tuple[Window, ...] | None,
        *,
        bias: Tensor | None = None,
        room: int | None,
        tiling: Tiling,
    ) -> None:
        rows = x.reshape(-1, x.shape[-1])
        aligned = rows.is_contiguous() and rows.data_ptr() % _ALIGN == 0
        self._x = rows if aligned else rows.clone(memory_format=_contiguous())
        self._weights = weights
        self._windows = coded
        self._dtype: DType = dtype_of(x.dtype)
        self._columns = weights[0].shape[0]
        self._variant = Variant(
            self._dtype,
            pairs=len(weights) > 1,
            encodes=coded is not None,
            activation=activation,
            bias=bias is not None,
            cluster=tiling.cluster,
        )
        self._elements = self._x.shape[0] * self._columns
        steps = -(-x.shape[-1] // STEP)
        group = max(1, tiling.group // tiling.cluster)
        self.job = jobs.Job(
            rows=self._x.shape[0],
            columns=self._columns,
            steps=steps,
            group=group,
            lead=min(tiling.lead, steps),
        )
        for panel in range(2):
            self.job.bias[panel] = 0 if bias is None else bias.data_ptr()
        self._code: _Memory | None = None
        if coded is not None:
            self._code = _Memory(self._x, self._dtype, self._elements, coded, room)
            for panel in range(2):
                self.job.codings[panel] = self._code.coding(panel % len(coded))

    def new(self) -> Tensor:
        """Return uninitialised memory for a result."""
        return self._x.new_empty(self._x.shape[0], self._columns)

    def multiply(self) -> None:
        """Launch the product, and the kernel that completes its blobs."""
        cluster = self._variant.cluster
        share = PANEL_COLUMNS // cluster
        maps = [modules.tensor_map(self._x, jobs.TILE_ROWS)]
        maps += [modules.tensor_map(weight, share) for weight in self._weights]
        arguments = (maps[0], maps[1], maps[-1], self.job)
        blocks = jobs.product_blocks(
            self._variant, self._x.shape[0], self._columns, _processors(self._x.get_device())
        )
        shape = blocks, jobs.PRODUCT_THREADS
        modules.launch(self._variant, "gemm_product", shape, self._x, arguments)
        if self._code is not None:
            self._code.end(self._variant)

    def codes(self) -> Codes | None:
        """Return the encoded results, None if nothing is encoded."""
        if self._code is None or self._windows is None:
            return None
        return Codes(self._code.blobs, self._windows, self._code.sizes())


class _Memory:
    """The buffers of a call's blobs, and scratch memory that is unused once they are complete."""

    def __init__(
        self,
        like: Tensor,
        dtype: DType,
        elements: int,
        coded: tuple[Window, ...],
        room: int | None,
    ) -> None:
        import torch

        def new(nbytes: int) -> Tensor:
            return torch.empty(nbytes, dtype=torch.uint8, device=like.device)

        place = geometry(dtype, elements)
        self._dtype, self._elements, self._windows = dtype, elements, coded
        self._like = like
        self._fixed_offset = place.fixed_offset
        self.blobs = tuple(
            new(window.room(dtype, elements) if room is None else room) for window in coded
        )
        self._slots = [new(jobs.slot_bytes(elements)) for _ in coded]
        self._escapes = torch.zeros(
            len(coded), -(-place.tiles // 4) * 4, dtype=torch.int32, device=like.device
        )
        self._result = torch.empty(len(coded), 2, dtype=torch.int64, device=like.device)

    def coding(self, which: int) -> jobs.Coding:
        """Return the addresses to which the kernel encodes a product's elements."""
        return jobs.Coding(
            self.blobs[which].data_ptr() + self._fixed_offset,
            self._slots[which].data_ptr(),
            self._escapes[which].data_ptr(),
            self._windows[which].base,
            0,
        )

    def end(self, variant: Variant) -> None:
        """Launch the kernel that writes records, directories and headers."""
        blobs = [
            jobs.Blob(
                blob.data_ptr(), blob.numel(), self._slots[i].data_ptr(),
                self._escapes[i].data_ptr(), self._result[i].data_ptr(), self._windows[i].base, 0,
            )
            for i, blob in enumerate(self.blobs)
        ]  # fmt: skip
        device = self._like.get_device()
        records = jobs.records(self._dtype, self._elements, blobs, _processors(device))
        shape = records.blocks * len(blobs), jobs.RECORD_THREADS
        modules.launch(variant, "gemm_records", shape, self._like, (records,))

    def sizes(self) -> Sizes:
        """Start the copy of the blobs' sizes to host memory."""
        import torch

        on_host = torch.empty(self._result.shape, dtype=torch.int64, pin_memory=True)
        on_host.copy_(self._result, non_blocking=True)
        make: Any = torch.cuda.Event
        arrived = make()
        arrived.record(torch.cuda.current_stream(self._like.device))
        return Sizes(on_host, arrived)


def _contiguous() -> Any:
    import torch

    return torch.contiguous_format


@cache
def _processors(device: int) -> int:
    import torch

    return int(torch.cuda.get_device_properties(device).multi_processor_count)
