"""Kernels are prepared all, or those that are wanted, and by whom; the codec is a stand-in."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator

import pytest
from storm_kernels.ancf import DType, prepared
from storm_kernels.ancf.prepared import RAW, PreparedCodec
from storm_kernels.errors import BackendUnavailable
from support.waiting import wait_until


class Codec:
    """Says of what it was prepared for, and cannot prepare float16."""

    made: list[Codec]

    def __init__(self, ordinal: int) -> None:
        self.prepared: list[tuple[DType, str]] = []
        Codec.made.append(self)

    def prepare_each(
        self, dtypes: Iterable[DType], *, modes: Iterable[str] = ("auto",)
    ) -> Iterator[DType]:
        for dtype in dtypes:
            if dtype is DType.FLOAT16:
                raise BackendUnavailable("no compiler here")
            self.prepared += [(dtype, mode) for mode in modes]
            yield dtype


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[DType]:
    """The types for which a compiler was started; it ends at once."""
    started: list[DType] = []

    def command(dtype: DType) -> list[str]:
        started.append(dtype)
        return [sys.executable, "-c", ""]

    Codec.made = []
    monkeypatch.setattr(prepared, "CudaCodec", Codec)
    monkeypatch.setattr(prepared, "_command", command)
    return started


def test_everything_is_prepared_here(compiled: list[DType]) -> None:
    ours = (DType.BFLOAT16, DType.FLOAT32)
    prepared_types = [("window", ours), ("auto", (*ours, DType.BYTES))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepared, "WAYS", prepared_types)
        codec = PreparedCodec(0)
        wait_until(lambda: all(codec.is_ready(dtype) for dtype in (*ours, DType.BYTES)))
        codec.close()
    assert Codec.made[0].prepared[:2] == [(RAW, "raw"), (DType.BFLOAT16, "window")]
    assert not compiled


def test_only_what_is_wanted_is_prepared_and_compiled_elsewhere(compiled: list[DType]) -> None:
    codec = PreparedCodec(0, on_demand=True)
    assert Codec.made[0].prepared == [(RAW, "raw")]
    assert not codec.is_ready(DType.BFLOAT16)
    codec.want(DType.BFLOAT16)
    wait_until(lambda: codec.is_ready(DType.BFLOAT16))
    codec.want(DType.BFLOAT16)
    assert compiled == [DType.BFLOAT16]
    assert not codec.is_ready(DType.FLOAT32)
    wait_until(lambda: _wanted(codec, DType.FLOAT32, compiled))
    wait_until(lambda: codec.is_ready(DType.FLOAT32))
    codec.close()


def test_what_cannot_be_prepared_is_told_once(
    compiled: list[DType], caplog: pytest.LogCaptureFixture
) -> None:
    codec = PreparedCodec(0, on_demand=True)
    codec.want(DType.FLOAT16)
    wait_until(lambda: "cannot be compiled for float16" in caplog.text)
    wait_until(lambda: _wanted(codec, DType.BFLOAT16, compiled))
    codec.want(DType.FLOAT16)
    wait_until(lambda: codec.is_ready(DType.BFLOAT16))
    assert not codec.is_ready(DType.FLOAT16)
    assert compiled == [DType.FLOAT16, DType.BFLOAT16]
    codec.close()


def test_closing_ends_a_compiler(compiled: list[DType], monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import time; time.sleep(600)"
    monkeypatch.setattr(prepared, "_command", lambda _: [sys.executable, "-c", code])
    codec = PreparedCodec(0, on_demand=True)
    codec.want(DType.BFLOAT16)
    wait_until(lambda: codec._compiler is not None)
    process = codec._compiler
    assert isinstance(process, subprocess.Popen)
    codec.close()
    wait_until(lambda: process.poll() is not None)
    assert not codec.is_ready(DType.BFLOAT16)
    codec.want(DType.FLOAT32)
    assert not compiled
    codec.close()


def _wanted(codec: PreparedCodec, dtype: DType, compiled: list[DType]) -> bool:
    """Want a type; tell whether its turn has come."""
    codec.want(dtype)
    return dtype in compiled
