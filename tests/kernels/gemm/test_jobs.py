"""jobs.py: the numbers and structures that stand in the CUDA sources too, and grids."""

from __future__ import annotations

import ctypes
import re

from storm_kernels.ancf import DType
from storm_kernels.gemm import jobs, modules, window

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


def test_constants_and_activations_are_those_of_the_sources() -> None:
    for name, value in CONSTANTS.items():
        found = re.search(rf"constexpr u32 {name} = (\d+);", sources())
        assert found, name
        assert int(found[1]) == value
    found = re.search(r"enum Activation \{(.*?)\}", sources())
    assert found
    assert list(jobs.ACTIVATIONS.values()) == list(range(len(found[1].split(","))))


def test_structures_have_the_fields_of_the_sources() -> None:
    for name, ours in STRUCTURES.items():
        body = re.search(rf"struct {name} {{\n(.*?)\n}};", sources(), re.DOTALL)
        assert body
        code = re.sub(r"//.*", "", body[1])
        declared = re.findall(r"[\w*\s]+?[\s*](\w+(?:\[[^\]]+\])?(?:,\s*\*?\w+)*);", code)
        names = [one for text in declared for one in text.split(",")]
        fields = [re.sub(r"\[.*", "", one).strip(" *") for one in names]
        assert fields == [field[0] for field in ours._fields_], name


def test_records_have_the_headers_words() -> None:
    records = jobs.records(DType.BFLOAT16, 4096 * 9, [jobs.Blob()], 2)
    assert bytes(records.header)[:4] == b"ANCF"
    assert (records.tiles, records.blocks) == (9, 8)
    assert ctypes.sizeof(records) < 4096  # what a kernel can be given
