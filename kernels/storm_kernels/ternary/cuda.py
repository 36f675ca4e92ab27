"""Ternary tensors on a CUDA device: torch tensors in, torch tensors out, on torch's current stream.

No data is copied to the host, except that `encode` and `decode` wait to check that every value is
valid. Integer results equal those of reference.py, as do float32 results for few x. `multiply`
documents when floats are summed in another order. The kernels are the files in csrc/cuda. CuPy
compiles them at first use and keeps them in its cache.
"""

from __future__ import annotations

import hashlib
import threading
import warnings
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..cuda_compiler import load_cupy, probe
from ..errors import BackendUnavailable, UsageError
from . import hopper
from .planes import LANE_COLUMNS, ROW_ALIGN, Kind, Product, refuse_pair, row_bytes

if TYPE_CHECKING:
    import torch

    from ..cuda_driver.launch import Arguments, Function

__all__ = ["decode", "dot", "encode", "multiply", "probe"]

MATVEC_THREADS: Final = 256  # kMatvecThreads
MATVEC_LANES: Final = 8  # kMatvecLanes
VALUES_THREADS: Final = 256  # kValuesThreads
DOT_THREADS: Final = 256
DOT_BLOCKS: Final = 1024
ORDER_THREADS: Final = 256
PLANE_LANES: Final = 16  # kPlaneLanes
SPAN_COLUMNS: Final = 512  # kSpan
MATMUL_THREADS: Final = 256  # kRowWarps * kSplits warps
FLOAT_THREADS: Final = 128  # kFloatWarps warps
FLOAT_ROWS: Final = 16  # kFloatWarps * kFloatRows: rows per block
ROWS_OF_TILE: Final = 16

MATMUL: Final = {
    Kind.INT8: {1: (1, 1, 1, 8), 2: (1, 2, 1, 8), 4: (2, 4, 2, 4)},
    Kind.BFLOAT16: {1: (1, 1, 1, 8), 2: (1, 2, 1, 8), 4: (1, 4, 2, 4)},
}
"""Variants of ternary_matmul.cuh by the eights of x per warp: its tiles of 16 rows, its eights, and
the numbers of warps of a block that have different rows and that share rows."""

DENSE_FROM: Final = {Kind.INT8: 129, Kind.BFLOAT16: 129, Kind.FLOAT32: 17}
"""The batch size from which decoding w and torch's dense product is faster (DESIGN.md, "Measured").

On devices with the Hopper kernels, hopper.py decides first which batch sizes use these kernels."""

EARLY_CAPABILITY: Final = (9, 0)
"""From this compute capability on, a kernel can begin while the previous one still runs."""

MATMUL_COLUMNS: Final = 1 << 22
"""Below this many columns the tensor cores' int32 sums (2 * 128 per column) cannot overflow."""

_LETTERS: Final = {Kind.INT8: "i8", Kind.FLOAT32: "f32", Kind.BFLOAT16: "bf16"}
_SOURCE: Final = "ternary.cu"
_FOLDER: Final = Path(__file__).parent / "csrc" / "cuda"

# Arguments of the kernels: P is an address, Q a size, i, I and f are 32-bit numbers.
_TAKEN: Final = {
    "ternary_encode": "PQQfPPQP",
    "ternary_decode": "PPQQQPP",
    "ternary_dot": "PPPPQP",
    "ternary_matvec_i8": "PPQQQPPPi",
    "ternary_matvec_planes": "PPQQQPPPPi",
    "ternary_grouped_i8": "PPQQQPQPQQP",
    "ternary_multiply_f32": "PPQQQPQPQQP",
    "ternary_order_i8": "PQQQQPP",
    "ternary_order_bf16": "PQQQQP",
    "ternary_matmul": "PPQQQPQQPPPi",
    "ternary_hopper_order": "PQQQQQIP",
    "ternary_hopper": "PPQQQPQPPiII",
}
_EARLY: Final = (
    "ternary_order_i8",
    "ternary_order_bf16",
    "ternary_matmul",
    "ternary_hopper_order",
    "ternary_hopper",
)
"""Kernels that wait for the end of the previous kernel themselves."""


def encode(
    values: torch.Tensor, kind: Kind, threshold: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the planes of (rows, columns) values; waits for the stream.

    Raises UsageError if a value is invalid; api.encode then names the value.
    """
    import torch

    rows, columns = values.shape
    if kind is Kind.INT8 and threshold is not None:
        values, kind = values.float(), Kind.FLOAT32
    bit0 = torch.empty((rows, row_bytes(columns)), dtype=torch.uint8, device=values.device)
    bit1 = torch.empty_like(bit0)
    refused = _nothing_refused(values)
    _launch(
        "ternary_encode", f"ternary_encode_{_LETTERS[kind]}", -(-bit0.numel() // VALUES_THREADS),
        VALUES_THREADS, values,
        values.data_ptr(), rows, columns, -1.0 if threshold is None else threshold,
        bit0.data_ptr(), bit1.data_ptr(), bit0.shape[1], refused.data_ptr(),
    )  # fmt: skip
    if (place := int(refused)) >= 0:
        raise UsageError(f"value number {place} is none of -1, 0 and 1, or NaN")
    return bit0, bit1


def decode(bit0: torch.Tensor, bit1: torch.Tensor, columns: int, kind: Kind) -> torch.Tensor:
    """Return (rows, columns) values as int8 or float32; waits for the stream.

    Raises CorruptBlob for an invalid pair of bits.
    """
    values, refused = _decoded(bit0, bit1, columns, kind)
    if (place := int(refused)) >= 0:
        refuse_pair(place, tuple(values.shape))
    return values


def dot(a0: torch.Tensor, a1: torch.Tensor, b0: torch.Tensor, b1: torch.Tensor) -> torch.Tensor:
    """Return the sum of a * b over all bits, as a zero-dimensional int64 tensor."""
    import torch

    planes = [_words(plane.reshape(1, -1)) for plane in (a0, a1, b0, b1)]
    words = planes[0].shape[1] // ROW_ALIGN
    total = torch.zeros((), dtype=torch.int64, device=a0.device)
    blocks = min(DOT_BLOCKS, -(-words // DOT_THREADS))
    _launch(
        "ternary_dot", "ternary_dot", blocks, DOT_THREADS, total,
        *(plane.data_ptr() for plane in planes), words, total.data_ptr(),
    )  # fmt: skip
    return total


def multiply(product: Product) -> torch.Tensor:
    """Return (batch, rows) results.

    Integer results are exact; scaled to float32, they equal those of reference.py. For float32, or
    any float type with groups, fewer than DENSE_FROM x are summed in the order of reference.py.
    Other bfloat16 products are summed by tensor cores, and larger batches by torch's dense product.
    Both sum in float32 in their own order, and give NaN where w is 0 and x is not finite.
    """
    bit0, bit1 = _words(product.bit0), _words(product.bit1)
    if not product.rows or not product.batch:
        return _empty(product)
    if product.kind.is_float:
        return _floats(product, bit0, bit1)
    return _integers(product, bit0, bit1)


# --- int8 and planes ----------------------------------------------------------------------------


def _integers(product: Product, bit0: torch.Tensor, bit1: torch.Tensor) -> torch.Tensor:
    if product.kind is Kind.PLANES:
        if product.batch == 1 and not product.group:
            return _matvec_planes(product, bit0, bit1)
        assert product.x1 is not None
        x, _ = _decoded(_words(product.x), _words(product.x1), product.columns, Kind.INT8)
    else:
        x = product.x
    if product.group:
        return _grouped(product, bit0, bit1, x)
    if product.batch == 1 or product.columns >= MATMUL_COLUMNS:
        return _matvecs(product, bit0, bit1, x)
    can_be_dense = not (product.columns % 8 or product.rows % 8)
    if _hopper_takes(product, Kind.INT8, can_be_dense=can_be_dense):
        return _hopper(product, bit0, bit1, x, Kind.INT8)
    if can_be_dense and product.batch >= DENSE_FROM[Kind.INT8]:
        return _dense_integers(product, bit0, bit1, x)
    return _matmul(product, bit0, bit1, x, Kind.INT8)


def _matvecs(
    product: Product, bit0: torch.Tensor, bit1: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:
    out = _empty(product)
    blocks = -(-product.rows * MATVEC_LANES // MATVEC_THREADS)
    for b in range(product.batch):
        _launch(
            "ternary_matvec_i8", "ternary_matvec_i8", blocks, MATVEC_THREADS, out,
            *_matrix(product, bit0, bit1), x[b].data_ptr(), _address(product.scale),
            out[b].data_ptr(), product.out_kind,
        )  # fmt: skip
    return out


def _matvec_planes(product: Product, bit0: torch.Tensor, bit1: torch.Tensor) -> torch.Tensor:
    assert product.x1 is not None
    out, x0, x1 = _empty(product), _words(product.x), _words(product.x1)
    blocks = -(-product.rows * PLANE_LANES // MATVEC_THREADS)
    _launch(
        "ternary_matvec_planes", "ternary_matvec_planes", blocks, MATVEC_THREADS, out,
        *_matrix(product, bit0, bit1), x0.data_ptr(), x1.data_ptr(), _address(product.scale),
        out.data_ptr(), product.out_kind,
    )  # fmt: skip
    return out


def _grouped(
    product: Product, bit0: torch.Tensor, bit1: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:
    assert product.scale is not None
    out = _empty(product)
    _launch(
        "ternary_grouped_i8", "ternary_grouped_i8", product.rows * product.batch, LANE_COLUMNS, out,
        *_matrix(product, bit0, bit1), x.data_ptr(), x.shape[1], product.scale.data_ptr(),
        product.scale.shape[1], product.group // LANE_COLUMNS, out.data_ptr(),
    )  # fmt: skip
    return out


def _dense_integers(
    product: Product, bit0: torch.Tensor, bit1: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:
    import torch

    w, _ = _decoded(bit0, bit1, product.columns, Kind.INT8)
    totals: torch.Tensor = torch._int_mm(x, w.T)
    if product.scale is None:
        return totals if product.out_kind is Kind.INT32 else totals.long()
    scaled: torch.Tensor = totals.float() * product.scale[:, 0]
    return scaled


# --- floats -------------------------------------------------------------------------------------


def _floats(product: Product, bit0: torch.Tensor, bit1: torch.Tensor) -> torch.Tensor:
    on_tensor_cores = product.kind is Kind.BFLOAT16 and not product.group
    if on_tensor_cores and _hopper_takes(product, Kind.BFLOAT16):
        return _hopper(product, bit0, bit1, product.x, Kind.BFLOAT16)
    if product.batch >= DENSE_FROM[product.kind]:
        return _dense_floats(product, bit0, bit1)
    if on_tensor_cores:
        return _matmul(product, bit0, bit1, product.x, Kind.BFLOAT16)
    out, x, scale = _empty(product), product.x.float(), product.scale
    blocks = -(-product.rows // FLOAT_ROWS) * product.batch
    _launch(
        "ternary_multiply_f32", "ternary_grouped_f32" if product.group else "ternary_multiply_f32",
        blocks, FLOAT_THREADS, out,
        *_matrix(product, bit0, bit1), x.data_ptr(), x.shape[1], _address(scale),
        1 if scale is None else scale.shape[1], product.group // LANE_COLUMNS or 1,
        out.data_ptr(),
    )  # fmt: skip
    return out


def _dense_floats(product: Product, bit0: torch.Tensor, bit1: torch.Tensor) -> torch.Tensor:
    import torch

    w, _ = _decoded(bit0, bit1, product.columns, product.kind)
    if product.group:
        assert product.scale is not None
        w = w.float() * product.scale.repeat_interleave(product.group, 1)[:, : w.shape[1]]
        grouped: torch.Tensor = product.x.float() @ w.T
        return grouped
    out: torch.Tensor
    if product.kind is Kind.BFLOAT16:
        out = torch.mm(product.x, w.T, out_dtype=torch.float32)
    else:
        out = product.x @ w.T
    return out if product.scale is None else out * product.scale[:, 0]


# --- tensor cores -------------------------------------------------------------------------------


def _matmul(
    product: Product, bit0: torch.Tensor, bit1: torch.Tensor, x: torch.Tensor, kind: Kind
) -> torch.Tensor:
    import torch

    out, columns, batch = _empty(product), product.columns, product.batch
    ways = MATMUL[kind]
    tiles, width, row_warps, splits = ways[min(_rounded(-(-batch // 8)), max(ways))]
    spans, eights = -(-columns // SPAN_COLUMNS), -(-batch // (8 * width)) * width
    item = 1 if kind is Kind.INT8 else 2
    ordered = torch.empty(
        spans * eights * 8 * SPAN_COLUMNS * item, dtype=torch.uint8, device=x.device
    )
    sums = None
    if kind is Kind.INT8:
        sums = torch.empty(spans * eights * 8, dtype=torch.int32, device=x.device)
    order = f"ternary_order_{_LETTERS[kind]}"
    blocks = -(-spans * eights * 4 * 32 // ORDER_THREADS)
    taken = (x.data_ptr(), x.shape[1], columns, batch, eights, ordered.data_ptr())
    more = () if sums is None else (sums.data_ptr(),)
    _launch(order, order, blocks, ORDER_THREADS, out, *taken, *more)
    _launch(
        "ternary_matmul",
        f"ternary_matmul_{_LETTERS[kind]}_{tiles}_{width}_{row_warps}_{splits}",
        -(-product.rows // (ROWS_OF_TILE * tiles * row_warps)) * (eights // width),
        MATMUL_THREADS, out,
        *_matrix(product, bit0, bit1), ordered.data_ptr(), eights, batch, _address(sums),
        _address(product.scale), out.data_ptr(), product.out_kind,
    )  # fmt: skip
    return out


def _hopper(
    product: Product, bit0: torch.Tensor, bit1: torch.Tensor, x: torch.Tensor, kind: Kind
) -> torch.Tensor:
    import torch

    out, item = _empty(product), x.element_size()
    way = hopper.chosen(kind, product.rows, product.columns, product.batch)
    tiles = -(-product.batch // (8 * way.eights))
    spans = -(-product.columns // SPAN_COLUMNS)
    ordered = torch.empty(
        tiles * way.eights * 8 * spans * SPAN_COLUMNS * item, dtype=torch.uint8, device=x.device
    )
    lanes = tiles * way.eights * spans * hopper.ORDER_LANES
    _launch(
        "ternary_hopper_order", f"ternary_hopper_order_{_LETTERS[kind]}",
        -(-lanes // hopper.ORDER_THREADS), hopper.ORDER_THREADS, out,
        x.data_ptr(), x.shape[1] * item, product.columns * item, spans, product.batch,
        tiles * way.eights, way.eights, ordered.data_ptr(),
    )  # fmt: skip
    _launch(
        "ternary_hopper", f"ternary_hopper_{_LETTERS[kind]}_{way.eights}",
        -(-product.rows // way.rows) * tiles * way.splits, way.threads, out,
        *_matrix(product, bit0, bit1), ordered.data_ptr(), product.batch, _address(product.scale),
        out.data_ptr(), product.out_kind, way.stages, way.depth,
        cluster=way.splits, shared_bytes=way.shared_bytes(kind),
    )  # fmt: skip
    return out


def _hopper_takes(product: Product, kind: Kind, *, can_be_dense: bool = True) -> bool:
    """Return whether the Hopper kernels run on the device and are the fastest for this product."""
    rows, columns, batch = product.rows, product.columns, product.batch
    instead_of_dense = not can_be_dense and batch >= DENSE_FROM[kind]
    fastest = instead_of_dense or hopper.takes(kind, rows, columns, batch)
    return fastest and has_hopper(product.bit0.get_device())


@cache
def has_hopper(device: int) -> bool:
    """Return whether the Hopper kernels run on a device; compiles them, which takes seconds."""
    if _capability(device) != hopper.CAPABILITY:
        return False
    try:
        _module(device, hopper.SOURCE)
    except BackendUnavailable as error:
        warnings.warn(f"{error}; many x will take longer", RuntimeWarning, stacklevel=2)
        return False
    return True


def _rounded(eights: int) -> int:
    """Return the smallest power of two that is at least `eights`."""
    return 1 << (eights - 1).bit_length()


# --- helpers ------------------------------------------------------------------------------------


def _decoded(
    bit0: torch.Tensor, bit1: torch.Tensor, columns: int, kind: Kind
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rows, columns) values, and the index of an invalid pair, -1 if all are valid.

    Both are valid once the stream has passed the kernel.
    """
    import torch

    dtype = {Kind.INT8: torch.int8, Kind.FLOAT32: torch.float32, Kind.BFLOAT16: torch.bfloat16}
    rows, pitch = bit0.shape
    values = torch.empty((rows, columns), dtype=dtype[kind], device=bit0.device)
    refused = _nothing_refused(bit0)
    _launch(
        "ternary_decode", f"ternary_decode_{_LETTERS[kind]}",
        -(-rows * -(-columns // 8) // VALUES_THREADS), VALUES_THREADS, values,
        bit0.data_ptr(), bit1.data_ptr(), pitch, rows, columns, values.data_ptr(),
        refused.data_ptr(),
    )  # fmt: skip
    return values, refused


def _nothing_refused(like: torch.Tensor) -> torch.Tensor:
    """Return an index tensor of -1: as an unsigned number it is above any value's index."""
    import torch

    return torch.full((), -1, dtype=torch.int64, device=like.device)


def _matrix(product: Product, bit0: torch.Tensor, bit1: torch.Tensor) -> tuple[int, ...]:
    return bit0.data_ptr(), bit1.data_ptr(), bit0.shape[1], product.rows, product.columns


def _empty(product: Product) -> torch.Tensor:
    import torch

    dtypes = {Kind.FLOAT32: torch.float32, Kind.INT32: torch.int32, Kind.INT64: torch.int64}
    shape = product.batch, product.rows
    return torch.empty(shape, dtype=dtypes[product.out_kind], device=product.bit0.device)


def _words(plane: torch.Tensor) -> torch.Tensor:
    """Return the plane with rows of whole 8-byte words, starting at a multiple of 16 bytes."""
    import torch

    missing = -plane.shape[1] % ROW_ALIGN
    if missing:
        return torch.nn.functional.pad(plane, (0, missing))
    return plane.clone() if plane.data_ptr() % 16 else plane


def _address(array: torch.Tensor | None) -> int:
    return 0 if array is None else int(array.data_ptr())


def _launch(
    family: str,
    kernel: str,
    blocks: int,
    threads: int,
    like: torch.Tensor,
    *values: float,
    cluster: int = 1,
    shared_bytes: int = 0,
) -> None:
    """Launch a kernel on torch's current stream of `like`'s device, unless it has no blocks."""
    import torch

    if not blocks:
        return
    from ..cuda_driver.launch import launch, launch_early

    index = like.get_device()
    arguments, taken = _arguments(family)
    arguments.pack(*values)  # type: ignore[arg-type] # a threshold is a float
    with torch.cuda.device(index):
        stream = torch.cuda.current_stream(index).cuda_stream
        function = _function(index, kernel, shared_bytes)
        if family in _EARLY and _capability(index) >= EARLY_CAPABILITY:
            launch_early(function, blocks, threads, stream, taken, cluster=cluster)
        else:
            launch(function, blocks, threads, stream, taken)


@cache
def _capability(device: int) -> tuple[int, int]:
    import torch

    return torch.cuda.get_device_capability(device)


_threads = threading.local()  # each thread packs its own arguments


def _arguments(family: str) -> tuple[Arguments, int]:
    from ..cuda_driver.launch import Arguments

    known: dict[str, tuple[Arguments, int]] = _threads.__dict__.setdefault("known", {})
    if family not in known:
        kinds = {str(number): kind for number, kind in enumerate(_TAKEN[family])}
        arguments = Arguments(kinds)
        known[family] = arguments, arguments.of_kernel(*kinds)
    return known[family]


@lru_cache(maxsize=512)
def _function(device: int, kernel: str, shared_bytes: int) -> Function:
    from ..cuda_driver.launch import Function

    for_hopper = kernel.startswith("ternary_hopper")
    source = hopper.SOURCE if for_hopper else _SOURCE
    with load_cupy().cuda.Device(device):
        function = _module(device, source).get_function(kernel)
        if for_hopper:
            # Also for the kernel that orders x: a multiprocessor with another carveout accepts no
            # block of the next kernel before all its running blocks have ended.
            function.preferred_shared_memory_carveout = 100
        if shared_bytes:
            # Launches with other sizes share this function.
            function.max_dynamic_shared_size_bytes = hopper.MEMORY_BYTES
        return Function(function.kernel.ptr, shared_bytes, function)


_compiling: Final = threading.Lock()


def _module(device: int, source: str) -> Any:
    """Return the compiled kernels; if several threads call at first, only one of them compiles."""
    with _compiling:
        return _compiled(device, source)


@cache
def _compiled(device: int, source: str) -> Any:
    cupy = load_cupy()
    try:
        with cupy.cuda.Device(device):
            module = cupy.RawModule(code=source_text(source), options=options(source))
            module.compile()
    except Exception as error:
        raise BackendUnavailable(f"{source} cannot be compiled: {error}") from error
    return module


def source_text(source: str) -> str:
    """Return the source text to compile for a file of csrc/cuda.

    CuPy's cache identifies a module by this text, so the text includes a digest of the sources.
    """
    digest = hashlib.sha256()
    for path in sorted(_FOLDER.glob("ternary*.cu*")):
        digest.update(path.read_bytes())
    return f'#include "{source}"\n// {digest.hexdigest()[:8]}\n'


def options(source: str) -> tuple[str, ...]:
    """Return the compiler's options; CuPy adds the device's architecture."""
    # Given two architectures, NVRTC (12.9 to 13.5) uses the one with more features.
    special = ("-arch=sm_90a",) if source == hopper.SOURCE else ()
    return ("-std=c++17", f"-I{_FOLDER}", *special)
