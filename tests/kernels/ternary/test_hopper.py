"""The kernels for Hopper without a GPU: how products are cut, and the kernels on a CPU."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from storm_kernels.ternary import cuda, encode, hopper
from storm_kernels.ternary.hopper import Way
from storm_kernels.ternary.planes import Kind

SOURCES = Path(cuda.__file__).parent / "csrc" / "cuda"
PROGRAM = Path(__file__).parent / "hopper_on_cpu.cpp"
KINDS = [Kind.INT8, Kind.BFLOAT16]
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here")
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here")


def test_the_ways_chosen_are_ones_that_the_kernel_takes():
    for kind, batch, rows, columns in product(
        KINDS,
        (1, 16, 17, 40, 64, 65, 128, 129, 1000),
        (1, 64, 2048, 13824, 1 << 20),
        (1, 512, 513, 2560, 16384),
    ):
        way = hopper.chosen(kind, rows, columns, batch)
        assert way.groups in (1, 2, 4)
        assert way.groups <= hopper.MAX_GROUPS[way.eights]
        assert 8 * way.eights % way.splits == 0
        assert way.splits == 1 or way.splits <= -(-columns // hopper.SPAN_COLUMNS)
        assert 2 <= way.stages <= hopper.MAX_STAGES
        assert 1 <= way.depth <= hopper.MAX_DEPTH
        assert way.shared_bytes(kind) <= hopper.MEMORY_BYTES


def test_what_is_compiled_is_what_may_be_chosen():
    compiled = re.findall(
        r"^HOPPER_BOTH\((\d+), (\d+)\)", (SOURCES / hopper.SOURCE).read_text(), re.MULTILINE
    )
    assert {int(eights): int(groups) for eights, groups in compiled} == hopper.MAX_GROUPS


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = tmp_path_factory.mktemp("hopper") / "kernels.so"
    subprocess.run(
        ["g++", "-std=c++17", "-O1", "-U_FORTIFY_SOURCE", "-shared", "-fPIC", f"-I{SOURCES}",
         "-Wno-unknown-pragmas", "-o", library, PROGRAM],
        check=True, timeout=300,
    )  # fmt: skip
    loaded = ctypes.CDLL(str(library))
    loaded.order.restype = loaded.multiply.restype = ctypes.c_bool
    return loaded


def aligned(nbytes: int, align: int = 128) -> np.ndarray:
    memory = np.full(nbytes + align, 0xA5, np.uint8)
    start = -memory.ctypes.data % align
    return memory[start : start + nbytes]


def placed(array: np.ndarray) -> np.ndarray:
    memory = aligned(array.nbytes)
    memory[:] = array.reshape(-1).view(np.uint8)
    return memory


def multiplied(
    program: ctypes.CDLL, kind: Kind, w: np.ndarray, x: np.ndarray, way: Way, seed: int = 0
) -> np.ndarray:
    """Return x w^T as the kernels compute it; x are int8, or the bits of bfloat16."""
    (rows, columns), batch = w.shape, len(x)
    bit0, bit1 = (placed(plane) for plane in encode(w, backend="numpy"))
    given, pitch = placed(x), bit0.size // rows
    tiles, spans = -(-batch // (8 * way.eights)), -(-columns // hopper.SPAN_COLUMNS)
    ordered = aligned(tiles * way.eights * 8 * spans * hopper.SPAN_COLUMNS * x.itemsize)
    out = np.full(batch * rows + 16, 77, np.float32 if kind is Kind.BFLOAT16 else np.int32)
    out_kind = Kind.FLOAT32 if kind is Kind.BFLOAT16 else Kind.INT32

    def address(array: np.ndarray) -> ctypes.c_void_p:
        return ctypes.c_void_p(array.ctypes.data)

    def size(number: int) -> ctypes.c_uint64:
        return ctypes.c_uint64(number)

    lanes = tiles * way.eights * spans * hopper.ORDER_LANES
    assert program.order(
        int(kind is Kind.BFLOAT16), address(given), size(columns * x.itemsize),
        size(columns * x.itemsize), size(spans), size(batch), size(tiles * way.eights), way.eights,
        address(ordered), -(-lanes // hopper.ORDER_THREADS),
    )  # fmt: skip
    assert program.multiply(
        int(kind is Kind.BFLOAT16), way.eights, way.groups, way.splits,
        size(way.shared_bytes(kind)), address(bit0), address(bit1), size(pitch), size(rows),
        size(columns), address(ordered), size(batch), None, address(out), int(out_kind),
        way.stages, way.depth, size(seed),
    ), "threads wait for each other for ever"  # fmt: skip
    assert (out[batch * rows :] == 77).all()
    return out[: batch * rows].reshape(batch, rows)


CASES = [
    # rows, columns, batch, eights, groups, splits, stages, depth
    (1, 1, 1, 2, 1, 1, 2, 1),
    (63, 31, 3, 2, 1, 1, 4, 1),
    (65, 513, 16, 2, 2, 1, 3, 2),
    (130, 1100, 20, 2, 2, 2, 4, 1),
    (130, 2100, 9, 2, 1, 4, 2, 2),
    (64, 4097, 17, 8, 1, 8, 3, 1),
    (257, 1100, 60, 8, 4, 1, 2, 3),
]


SEEDED = [(case, 0) for case in CASES] + [(case, 1) for case in CASES[:3]]
"""With a seed threads run in an order drawn at random, which takes long with the larger ones."""


@needs_gxx
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize(
    "seeded", [SEEDED, pytest.param([(case, 1) for case in CASES[3:]], marks=pytest.mark.slow)]
)
def test_the_kernels_multiply_every_value_once(program, kind, seeded):
    for (rows, columns, batch, *numbers), seed in seeded:
        rng = np.random.default_rng((rows, columns, batch, *numbers))
        w = rng.integers(-1, 2, (rows, columns)).astype(np.int8)
        x = rng.integers(-128, 128, (batch, columns)).astype(np.int8)
        given = x
        if kind is Kind.BFLOAT16:  # whole numbers of 8 bits, whose sums float32 has
            given = (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        found = multiplied(program, kind, w, given, Way(*numbers), seed)
        expected = x.astype(np.int64) @ w.astype(np.int64).T
        assert (found == expected).all(), (rows, columns, batch, numbers, seed)


@pytest.mark.slow
@needs_nvcc
def test_the_compiler_leaves_products_asynchronous(tmp_path):
    """It would say of each kernel where it cannot, and where registers go to memory."""
    done = subprocess.run(
        ["nvcc", "-std=c++17", "-arch=sm_90a", "-cubin", "-Xptxas", "-v",
         "-o", tmp_path / "kernels.cubin", SOURCES / hopper.SOURCE],
        check=True, timeout=300, capture_output=True, text=True,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert said.count("Compiling entry function") == 2 * len(hopper.MAX_GROUPS) + 2
    assert "serialized" not in said
    spilled = re.findall(r"(\d+) bytes spill stores", said)
    assert all(int(count) <= 16 for count in spilled), spilled
