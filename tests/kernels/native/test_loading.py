"""Finding and loading the C library: what is missing is said, what is too old is refused."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
from storm_kernels import native
from storm_kernels.ancf.cpu import Options
from storm_kernels.errors import BackendUnavailable
from storm_kernels.native import InstructionSet, Status

KERNELS = Path(__file__).parents[3] / "kernels" / "storm_kernels"  # a wheel has no headers
HEADER = (KERNELS / "native" / "native.h").read_text()
ANCF_HEADER = (KERNELS / "ancf" / "csrc" / "ancf.h").read_text()


@pytest.fixture
def fresh():
    """`load` without its memory, before and after."""
    native.load.cache_clear()
    yield
    native.load.cache_clear()


def enumerators(name: str) -> dict[str, int]:
    body = re.search(rf"enum {name} \{{(.*?)\}};", HEADER, re.DOTALL)
    assert body is not None
    return {key: int(value) for key, value in re.findall(r"(\w+) = (-?\d+)", body[1])}


def test_the_headers_numbers_are_ours():
    assert enumerators("storm_isa") == {
        f"STORM_ISA_{one.name}": one.value for one in InstructionSet
    } | {"STORM_ISA_COUNT": len(InstructionSet) - 1}
    assert enumerators("storm_status") == {f"STORM_{one.name}": one.value for one in Status} | {
        "STORM_OK": 0
    }
    assert f"#define STORM_ABI_VERSION {native.ABI_VERSION}\n" in HEADER


def test_the_options_are_the_structs_fields():
    body = re.search(r"struct storm_ancf_options \{(.*?)\};", ANCF_HEADER, re.DOTALL)
    assert body is not None
    assert re.findall(r"int32_t (\w+);", body[1]) == [field[0] for field in Options._fields_]
    assert ctypes.sizeof(Options) == 4 * len(Options._fields_)


def test_a_library_that_is_missing_broken_or_of_another_version_is_named(
    fresh, monkeypatch, tmp_path
):
    assert native.available_sets()[0] is InstructionSet.PORTABLE
    native.load.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(native, "ABI_VERSION", native.ABI_VERSION + 1)
        with pytest.raises(BackendUnavailable, match=f"needs {native.ABI_VERSION}"):
            native.load()
    path = tmp_path / native.FILE_NAME
    monkeypatch.setattr(native, "_candidates", lambda: iter([path]))
    with pytest.raises(BackendUnavailable, match=re.escape(str(tmp_path))):
        native.load()
    path.write_text("not a library")
    with pytest.raises(BackendUnavailable, match=re.escape(str(path))):
        native.load()
