"""csrc/cuda: what becomes of sums, byte for byte as the reference has it; and that it compiles.

The kernels' code of elements runs on a CPU (support/gemm_on_cpu.py);
tests/kernels/gemm/test_hopper.py runs all of it on a device.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from storm_kernels import ancf
from storm_kernels.ancf.dtypes import dtype_of
from storm_kernels.gemm import hopper, jobs, modules, reference
from storm_kernels.gemm.activations import activate
from storm_kernels.gemm.jobs import Variant
from support.gemm_on_cpu import Emulated, build, tensor_map
from torch import Tensor

DEPTH = 64
SLOW = pytest.mark.slow  # what is compiled for one test alone
DTYPES = [torch.bfloat16, pytest.param(torch.float16, marks=SLOW)]


def bits(tensor: Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.int16).numpy().view(np.uint16).ravel()


def operands(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(rows)
    x = torch.randn(rows, DEPTH)
    x[rows // 2] = 0  # a padded position: all of its elements escape
    x[rows // 3] *= 30
    x[-1] *= 1e-3
    return (
        x.to(dtype),
        torch.randn(columns, DEPTH).to(dtype),
        torch.randn(columns, DEPTH).mul(0.2).to(dtype),
    )


def rounded(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    sums = x.float() @ weight.float().t()
    return (sums if bias is None else sums + bias.float()).to(x.dtype)


def check_blob(codes: hopper.Codes, which: int, expected: Tensor) -> None:
    """A blob is the reference's with that window, and every backend decodes it."""
    nbytes, fits = codes.sizes.wait()[which]
    assert fits
    blob = codes.blobs[which][:nbytes].numpy()
    base = codes.windows[which].base
    assert np.array_equal(blob, reference.encode(bits(expected), dtype_of(expected.dtype), base))
    for backend in ("numpy", "cpu"):
        decoded = ancf.decode(ancf.Blob(blob, tuple(expected.shape)), backend=backend)
        assert np.array_equal(bits(decoded), bits(expected))


@pytest.mark.parametrize("dtype", DTYPES)
def test_pairs_are_encoded_as_the_reference_has_it(emulated: Emulated, dtype: torch.dtype) -> None:
    for rows, columns in ((40, 128), (37, 384), (64, 128), (33, 256)):
        x, gate, up = operands(rows, columns, dtype)
        first, second = hopper.windows(x, (gate, up))
        h, codes = hopper.gated(x, (gate, up), "silu", coded=(first, second))
        assert codes is not None
        raw_gate, raw_up = rounded(x, gate), rounded(x, up)
        check_blob(codes, 0, raw_gate)
        check_blob(codes, 1, raw_up)
        assert np.array_equal(bits(h), bits(activate("silu", raw_gate) * raw_up))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_is_written_and_encoded(emulated: Emulated, dtype: torch.dtype) -> None:
    for columns in (128, 256, 384):
        x, weight, other = operands(19, columns, dtype)
        bias = other[:, 0].contiguous()
        (window,) = hopper.windows(x, (weight,))
        y, codes = hopper.product(x, weight, bias, window=window)
        assert codes is not None
        expected = rounded(x, weight, bias)
        assert np.array_equal(bits(y), bits(expected))
        check_blob(codes, 0, expected)
        plain, none = hopper.product(x, weight)
        assert none is None
        assert np.array_equal(bits(plain), bits(rounded(x, weight)))


@pytest.mark.parametrize(
    "name", ["silu", "gelu", *(pytest.param(one, marks=SLOW) for one in ("gelu_tanh", "relu"))]
)
def test_the_backward_pass_has_pytorchs_roundings(emulated: Emulated, name: str) -> None:
    x, gate, up = operands(21, 256, torch.bfloat16)
    first, second = hopper.windows(x, (gate, up))
    h, codes = hopper.gated(x, (gate, up), name, coded=(first, second))
    assert codes is not None
    grad = torch.randn(21, 256).to(x.dtype)
    bases = (first.base, second.base)
    of_gate, of_up, again = hopper.backward(grad, codes.blobs, bases, name)
    raw_gate, raw_up = (rounded(x, one).requires_grad_() for one in (gate, up))
    (activate(name, raw_gate) * raw_up).backward(grad)
    assert raw_gate.grad is not None
    assert raw_up.grad is not None
    assert np.array_equal(bits(again), bits(h))
    torch.testing.assert_close(of_up, raw_up.grad, rtol=2**-7, atol=1e-5)
    torch.testing.assert_close(of_gate, raw_gate.grad, rtol=2**-7, atol=2e-5)
    assert emulated.launched[-1] == "gemm_backward"


def test_a_blob_that_does_not_fit_says_so_and_stays_in_its_room(emulated: Emulated) -> None:
    x, gate, up = operands(40, 256, torch.bfloat16)
    (window, _) = hopper.windows(x, (gate, up))
    place = reference.header(ancf.DType.BFLOAT16, 40 * 256, 0).geometry
    room = place.payload_offset + 64
    memory = torch.full((room + 4096,), 7, dtype=torch.uint8)
    made = hopper._Memory(x, ancf.DType.BFLOAT16, 40 * 256, (window,), room)
    made.blobs = (memory[:room],)
    variant = Variant(ancf.DType.BFLOAT16, pairs=False, encodes=True)
    y = torch.empty(40, 256, dtype=x.dtype)
    job = jobs.Job(rows=40, columns=256, steps=1, group=1, out=y.data_ptr())
    for panel in range(2):
        job.codings[panel] = made.coding(0)
    emulated.launch(variant, "gemm_product", (1, 384), x, (x, gate, gate, job))
    made.end(variant)
    ((nbytes, fits),) = made.sizes().wait()
    assert not fits
    assert nbytes > room
    assert (memory[room:] == 7).all()


@pytest.mark.parametrize(("seed", "lead"), [(0, 0), pytest.param(5, 3, marks=SLOW)])
@pytest.mark.parametrize("cluster", [pytest.param(1, marks=SLOW), 2])
@pytest.mark.parametrize(
    ("dtype", "pairs", "rows", "columns", "depth"),
    [
        (torch.bfloat16, True, 300, 256, 328),
        pytest.param(torch.bfloat16, False, 130, 384, 72, marks=SLOW),
        pytest.param(torch.float16, True, 129, 128, 400, marks=SLOW),
    ],
)
def test_the_products_of_a_device_as_ptx_has_them(
    built: Path, dtype: torch.dtype, pairs: bool, rows: int, columns: int, depth: int, cluster: int,
    seed: int, lead: int,
) -> None:  # fmt: skip
    """Barriers, copies into the ring, descriptors, the order of tiles: all but the instructions."""
    variant = Variant(
        dtype_of(dtype), pairs=pairs, encodes=False, activation="silu" if pairs else "none",
        cluster=cluster,
    )  # fmt: skip
    library = build(built, variant, "run_gemm_hopper.cpp", "-O2")
    torch.manual_seed(rows)
    x, gate, up = (torch.randn(size, depth).to(dtype) for size in (rows, columns, columns))
    out = torch.full((rows, columns), 7.0).to(dtype)
    steps = -(-depth // jobs.STEP)
    job = jobs.Job(rows=rows, columns=columns, steps=steps, group=2, lead=min(lead, steps))
    job.out = out.data_ptr()
    weights = [gate, up if pairs else gate]
    share = jobs.PANEL_COLUMNS // cluster
    maps = [tensor_map(x, jobs.TILE_ROWS), *(tensor_map(one, share) for one in weights)]
    blocks = jobs.product_blocks(variant, rows, columns, 2)
    assert blocks == 2
    failed = library.product(
        *map(ctypes.byref, maps), ctypes.byref(job), blocks, ctypes.c_uint64(seed)
    )
    assert not failed, "threads wait for each other for ever"
    exact = [x.double() @ one.double().t() for one in weights]
    expected = activate("silu", exact[0]) * exact[1] if pairs else exact[0]
    assert (out.double() - expected).norm() < 0.01 * expected.norm()
    atol = float(expected.abs().max()) * 2**-7
    torch.testing.assert_close(out.double(), expected, rtol=2**-5, atol=atol)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no CUDA compiler (nvcc) here")
@pytest.mark.parametrize(
    "dtype",
    [ancf.DType.BFLOAT16, pytest.param(ancf.DType.FLOAT16, marks=SLOW)],
)
@pytest.mark.parametrize("pairs", [True, pytest.param(False, marks=SLOW)])
def test_it_compiles_for_hopper(tmp_path: Path, dtype: ancf.DType, pairs: bool) -> None:
    variant = Variant(dtype, pairs=pairs, encodes=True, activation="silu" if pairs else "none")
    defines = [f"-D{name}={value}" for name, value in variant.defines().items()]
    output = tmp_path / "gemm.cubin"
    done = subprocess.run(
        ["nvcc", "-std=c++17", "-arch=sm_90a", f"-I{modules.SOURCE.parent}", *defines,
         "-Xptxas=-v", "-cubin", "-o", output, modules.SOURCE],
        check=True, timeout=300, capture_output=True, text=True,
    )  # fmt: skip
    assert "serialized" not in done.stderr, "products would not overlap"
    assert "setmaxnreg ignored" not in done.stderr
    for name in (b"gemm_product", b"gemm_records", b"gemm_backward"):
        assert name in output.read_bytes()
