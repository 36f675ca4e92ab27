"""The operations of ancf_device.cuh: a device and the CPU that stands in for it give the same.

What test_cuda_on_cpu.py shows holds for a device only as far as this does: where an operation of
theirs differs, kernels pass there and fail on a device. device_operations.cu calls each of them.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from ctypes import CDLL
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from storm_kernels import backends
from storm_kernels.ancf import cuda_modules
from support.cuda_on_cpu import HOST, SOURCES, Guarded, compile_library

SOURCE = HOST / "device_operations.cu"
OPERATIONS = re.findall(r'lane\.put\("([^"]+)"', SOURCE.read_text())
LANES = 32
CELL_BYTES = 48  # sizeof(Cell)
SHARED_BYTES = 16 * LANES
EDGES = [0, 1, 31, 32, 0x7654, 0xFEDC, 0xFFFF, 0x1_0000, 0x8000_0000, 0xFFFF_FFFF]

# What each operation gave: words of shape (blocks, LANES, 4), unused ones 0.
Results = dict[str, np.ndarray]
# From words of shape (blocks, 3, LANES), the last two axes a lane's a, b and c.
Run = Callable[[np.ndarray], Results]


def by_operation(words: np.ndarray) -> Results:
    shaped = words.view(np.uint32).reshape(-1, len(OPERATIONS), LANES, 4)
    return {name: shaped[:, place] for place, name in enumerate(OPERATIONS)}


def result_bytes(words: np.ndarray) -> int:
    return len(words) * len(OPERATIONS) * LANES * 16


def cell_bytes(words: np.ndarray) -> int:
    return len(words) * (LANES + 1) * CELL_BYTES


def run_on_cpu(library: CDLL, words: np.ndarray) -> Results:
    source, results = Guarded(words.nbytes), Guarded(result_bytes(words))
    cells = Guarded(cell_bytes(words))
    source.data[:] = words.reshape(-1).view(np.uint8)
    cells.data[:] = 0
    failed = library.run_device_operations(
        source.address, results.address, cells.address, len(OPERATIONS), len(words)
    )
    assert not failed, "threads wait for each other for ever"
    for buffer in (source, results, cells):
        buffer.check()
    return by_operation(results.data)


def run_on_device(words: np.ndarray) -> Results:
    cupy = cuda_modules.load_cupy()
    # CuPy's cache knows a module by its text, so the kernels' sources sign it too.
    text = f"{SOURCE.read_text()}\n// {cuda_modules._source_digest()}\n"
    kernel = cupy.RawModule(code=text, options=cuda_modules._OPTIONS).get_function(
        "device_operations"
    )
    results = cupy.full(result_bytes(words), 0xA5, cupy.uint8)
    cells = cupy.zeros(cell_bytes(words), cupy.uint8)
    arguments = (cupy.asarray(words, order="C"), results, cells, np.uint32(len(OPERATIONS)))
    kernel((len(words),), (LANES,), arguments, shared_mem=SHARED_BYTES)
    return by_operation(results.get())


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run every operation as the CPU has it."""
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler (g++) here")
    library = tmp_path_factory.mktemp("device_operations") / "operations.so"
    compile_library(HOST / "run_device_operations.cpp", library)
    return partial(run_on_cpu, CDLL(str(library)))


def of_every_kind() -> np.ndarray:
    """Words for many blocks: every three of the edges, any words, and words of any width."""
    rng = np.random.default_rng(0)
    edges = np.array(list(product(EDGES, repeat=3)), np.uint32)
    edges = np.resize(edges, (-(-len(edges) // LANES) * LANES, 3))
    edges = edges.reshape(-1, LANES, 3).transpose(0, 2, 1)
    words = rng.integers(0, 1 << 32, (32, 3, LANES), np.uint32)
    widths = rng.integers(0, 32, words.shape, np.uint32)
    return np.concatenate([edges, words, words >> widths, words << widths])


def in_hex(words: np.ndarray) -> str:
    return " ".join(f"{word:08x}" for word in words)


@pytest.fixture(scope="module")
def both(on_cpu: Run) -> tuple[np.ndarray, Results, Results]:
    """The same words, and what the CPU and the device make of them."""
    words = of_every_kind()
    return words, on_cpu(words), run_on_device(words)


@pytest.mark.gpu
@pytest.mark.skipif(not backends()["cuda"].available, reason=backends()["cuda"].detail)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_device_gives_the_same(both: tuple[np.ndarray, Results, Results], operation: str) -> None:
    words, cpu, device = both
    differ = np.argwhere((cpu[operation] != device[operation]).any(axis=2))
    if len(differ):
        block, lane = differ[0]
        given = words[block, :, lane]
        on_device, on_cpu = device[operation][block, lane], cpu[operation][block, lane]
        pytest.fail(
            f"{operation} differs in {len(differ)} lanes, first in lane {lane} of block {block}: "
            f"of {in_hex(given)} the device makes {in_hex(on_device)}, the CPU {in_hex(on_cpu)}"
        )


@pytest.mark.parametrize("folder", [SOURCES, HOST], ids=["device", "cpu"])
def test_no_operation_is_left_out(folder: Path) -> None:
    assert len(set(OPERATIONS)) == len(OPERATIONS)
    text = (folder / "ancf_device.cuh").read_text()
    declared = set(re.findall(r"^DEVICE \w+ \*?(\w+)\(", text, re.MULTILINE))
    called = set(re.findall(r"\b(\w+)\(", SOURCE.read_text()))
    helpers = {"from_lane"}  # of the CPU's own
    assert len(declared) > 30
    assert declared - called <= helpers
