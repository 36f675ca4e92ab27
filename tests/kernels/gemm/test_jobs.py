"""jobs.py: the numbers and structures that stand in the CUDA sources too, and grids."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
from storm_kernels.ancf import DType
from storm_kernels.gemm import jobs, modules, window
from storm_kernels.gemm.jobs import Variant

FOLDER = modules.SOURCE.parent
CONSTANTS = {
    "kChunk": window.CHUNK,
    "kSlotBytes": window.SLOT_BYTES,
    "kPanelColumns": jobs.PANEL_COLUMNS,
    "kStep": jobs.STEP,
    "kRecordThreads": jobs.RECORD_THREADS,
    "kBackwardThreads": jobs.BACKWARD_THREADS,
}
STRUCTURES = {
    "Coding": jobs.Coding,
    "Job": jobs.Job,
    "Blob": jobs.Blob,
    "Records": jobs.Records,
    "Encoded": jobs.EncodedBlob,
    "Backward": jobs.Backward,
}


def sources() -> str:
    return "\n".join(path.read_text() for path in sorted(FOLDER.glob("*.cuh")))


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_are_those_of_the_sources(name: str) -> None:
    found = re.search(rf"constexpr u32 {name} = (\d+);", sources())
    assert found, name
    assert int(found[1]) == CONSTANTS[name]


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_have_the_fields_of_the_sources(name: str) -> None:
    body = re.search(rf"struct {name} {{\n(.*?)\n}};", sources(), re.DOTALL)
    assert body
    code = re.sub(r"//.*", "", body[1])
    declared = re.findall(r"[\w*\s]+?[\s*](\w+(?:\[[^\]]+\])?(?:,\s*\*?\w+)*);", code)
    fields = [re.sub(r"\[.*", "", one).strip(" *") for text in declared for one in text.split(",")]
    assert fields == [field[0] for field in STRUCTURES[name]._fields_]


def test_activations_are_those_of_the_sources() -> None:
    found = re.search(r"enum Activation \{(.*?)\}", sources())
    assert found
    names = [name.strip() for name in found[1].split(",")]
    assert len(names) == len(jobs.ACTIVATIONS)
    assert list(jobs.ACTIVATIONS.values()) == list(range(len(names)))


def test_shared_memory_is_what_a_block_can_have() -> None:
    assert jobs.PRODUCT_SHARED_BYTES <= 227 << 10
    assert jobs.RECORDS_SHARED_BYTES == 4 * (jobs.RECORD_THREADS // 32 + 2 * jobs.RECORD_THREADS)


@pytest.mark.parametrize(
    ("rows", "columns", "blocks"), [(8192, 10880, 132), (1, 128, 2), (300, 256, 8)]
)
def test_blocks_are_whole_clusters(rows: int, columns: int, blocks: int) -> None:
    variant = Variant(DType.BFLOAT16, pairs=True, encodes=True, activation="silu", cluster=2)
    assert jobs.product_blocks(variant, rows, columns, 132) == blocks
    assert jobs.product_blocks(variant, rows, columns, 133) % 2 == 0


def test_records_have_the_headers_words() -> None:
    records = jobs.records(DType.BFLOAT16, 4096 * 9, [jobs.Blob()], 2)
    assert bytes(records.header)[:4] == b"ANCF"
    assert (records.tiles, records.blocks) == (9, 8)
    assert ctypes.sizeof(records) < 4096  # what a kernel can be given


def test_the_sources_are_in_the_package() -> None:
    assert {path.name for path in FOLDER.iterdir()} >= {"gemm.cu", "gemm_device.cuh"}
    assert Path(modules.SOURCE).is_file()
