"""The kernels for Hopper without a GPU: how products are cut, and the kernels on a CPU."""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from storm_kernels.ternary import cuda, encode, hopper
from storm_kernels.ternary.hopper import Way
from storm_kernels.ternary.planes import Kind, Product

SOURCES = Path(cuda.__file__).parent / "csrc" / "cuda"
PROGRAM = Path(__file__).parent / "hopper_on_cpu.cpp"
FIGURES = Path(__file__).parents[2] / "bench" / "results" / "ternary_h200.json"
KINDS = [Kind.INT8, Kind.BFLOAT16]
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here")
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("batch", [1, 16, 17, 40, 64, 65, 128, 129, 1000])
def test_all_ways_are_ones_that_the_kernel_takes(kind, batch):
    for rows in (1, 64, 2048, 13824, 1 << 20):
        for columns in (1, 512, 513, 2560, 16384):
            found = hopper.ways(kind, rows, columns, batch)
            assert min(found)[1] == hopper.chosen(kind, rows, columns, batch)
            for _, way in found:
                assert way.eights in hopper.MAX_GROUPS
                assert way.groups in (1, 2, 4)
                assert way.groups <= hopper.MAX_GROUPS[way.eights]
                assert 8 * way.eights % way.splits == 0
                assert way.splits == 1 or way.splits <= -(-columns // hopper.SPAN_COLUMNS)
                assert 2 <= way.stages <= hopper.MAX_STAGES
                assert 1 <= way.depth <= hopper.MAX_DEPTH
                assert way.shared_bytes(kind) <= hopper.MEMORY_BYTES


WAYS = {"_hopper": "hopper", "_matmul": "few", "_dense_integers": "dense", "_dense_floats": "dense"}
"""What cuda.py calls for a product, and the name of its figures."""


def taken(
    patch: pytest.MonkeyPatch, kind: Kind, rows: int, columns: int, batch: int, *, on_hopper: bool
) -> str:
    """Return which way a product goes, without going it."""
    for function, name in WAYS.items():
        patch.setattr(cuda, function, lambda *_, name=name: name)
    patch.setattr(cuda, "has_hopper", lambda _: on_hopper)
    nothing = torch.empty(rows, 0, dtype=torch.uint8)
    product = Product(nothing, nothing, columns, torch.empty(batch, 0), kind)
    through = cuda._floats if kind.is_float else cuda._integers
    return through(product, nothing, nothing)


def test_products_go_the_way_that_was_measured_to_be_the_fastest(monkeypatch):
    names = {Kind.INT8: "int8", Kind.BFLOAT16: "bfloat16"}
    rows = json.loads(FIGURES.read_text())["figures"]["compared_us"]
    many = [row for row in rows if row["batch"] > 1]
    assert {row["batch"] for row in many} >= {8, 12, 16, 32, 64, 96, 128, 192, 512}
    for row in many:
        for kind, name in names.items():
            shape = row["rows"], row["columns"], row["batch"]
            way = taken(monkeypatch, kind, *shape, on_hopper=True)
            times = {w: row[f"{name}_{w}"] for w in WAYS.values() if f"{name}_{w}" in row}
            assert times[way] <= 1.05 * min(times.values()), (name, shape, way, times)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize(
    ("on_hopper", "rows", "batch", "way"),
    [
        (True, 8192, 2, "few"),
        (True, 8192, 9, "hopper"),
        (True, 8192, 512, "hopper"),
        (True, 8192, 513, "dense"),
        (True, 2048, 513, "dense"),
        (False, 8192, 9, "few"),
        (False, 8192, 128, "few"),
        (False, 8192, 129, "dense"),
    ],
)
def test_the_kernels_for_hopper_are_used_where_they_run(
    monkeypatch, kind, on_hopper, rows, batch, way
):
    assert taken(monkeypatch, kind, rows, rows, batch, on_hopper=on_hopper) == way


@pytest.mark.parametrize(("rows", "columns"), [(8190, 8192), (8192, 8190), (2047, 2047)])
def test_integers_that_no_dense_product_takes_go_to_the_kernels(monkeypatch, rows, columns):
    for batch in (129, 513, 4000):
        shape = rows, columns, batch
        assert taken(monkeypatch, Kind.INT8, *shape, on_hopper=True) == "hopper"
        assert taken(monkeypatch, Kind.INT8, *shape, on_hopper=False) == "few"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize(
    ("rows", "columns", "batch", "groups", "splits"),
    [
        (2048, 2048, 16, 1, 4),
        (2048, 2048, 64, 1, 4),
        (8192, 8192, 64, 2, 2),
        (8192, 8192, 128, 2, 2),
        (13824, 2560, 16, 2, 1),
        (13824, 2560, 128, 2, 1),
        (16384, 16384, 16, 4, 2),
        (16384, 16384, 64, 4, 2),
        (16384, 16384, 128, 2, 1),
    ],
)
def test_the_fastest_ways_measured_are_chosen(kind, rows, columns, batch, groups, splits):
    way = hopper.chosen(kind, rows, columns, batch)
    assert (way.groups, way.splits) == (groups, splits)


def test_a_way_that_is_alone_leaves_no_room_for_another():
    for batch in (16, 64, 128):
        for kind in KINDS:
            way = hopper.chosen(kind, 8192, 8192, batch)
            assert way.alone
            both = 2 * (way.shared_bytes(kind) + hopper.RESERVED_BYTES)
            assert both > hopper.PROCESSOR_BYTES
            small = hopper.chosen(kind, 2048, 2048, batch)  # 128 blocks in clusters of 4
            assert not small.alone
            both = 2 * (small.shared_bytes(kind) + hopper.RESERVED_BYTES)
            assert both <= hopper.PROCESSOR_BYTES


def test_sources_have_the_same_numbers():
    text = (SOURCES / "ternary_hopper.cuh").read_text()
    numbers = {
        "kHopperSpan": hopper.SPAN_COLUMNS, "kHopperOrderThreads": hopper.ORDER_THREADS,
        "kGroupThreads": hopper.GROUP_THREADS, "kGroupRows": hopper.GROUP_ROWS,
        "kMaxStages": hopper.MAX_STAGES, "kBarrierBytes": hopper.BARRIER_BYTES,
        "kMeetingPad": hopper.MEETING_PAD,
    }  # fmt: skip
    for name, value in numbers.items():
        assert f" {name} = {value};" in text
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


def product(
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
    (200, 2560, 9, 2, 1, 4, 2, 2),
    (64, 4097, 17, 8, 1, 8, 3, 1),
    (257, 1600, 60, 8, 4, 1, 2, 3),
]


SLOW = CASES[3], CASES[4], CASES[5], CASES[6]  # where threads run in an order drawn at random
SEEDED = [
    pytest.param(case, seed, marks=pytest.mark.slow if seed and case in SLOW else [])
    for case in CASES
    for seed in (0, 1)
]


@needs_gxx
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize(("case", "seed"), SEEDED)
def test_the_kernels_multiply_every_value_once(program, kind, case, seed):
    rows, columns, batch, *numbers = case
    rng = np.random.default_rng(case)
    w = rng.integers(-1, 2, (rows, columns)).astype(np.int8)
    x = rng.integers(-128, 128, (batch, columns)).astype(np.int8)
    given = x
    if kind is Kind.BFLOAT16:  # whole numbers of 8 bits, whose sums float32 has
        given = (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    found = product(program, kind, w, given, Way(*numbers), seed)
    expected = x.astype(np.int64) @ w.astype(np.int64).T
    assert (found == expected).all()


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


def test_only_the_kernels_for_hopper_ask_for_its_features():
    assert "-arch=sm_90a" in cuda.options(hopper.SOURCE)
    assert not any("arch" in option for option in cuda.options("ternary.cu"))
