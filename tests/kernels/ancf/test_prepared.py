"""All kernels are prepared, behind the caller's back; the codec is a stand-in."""

from __future__ import annotations

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


@pytest.fixture(autouse=True)
def codec(monkeypatch: pytest.MonkeyPatch) -> None:
    Codec.made = []
    monkeypatch.setattr(prepared, "CudaCodec", Codec)


def test_everything_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = (DType.BFLOAT16, DType.FLOAT32)
    ways = [("window", ours), ("auto", (*ours, DType.BYTES))]
    monkeypatch.setattr(prepared, "WAYS", ways)
    codec = PreparedCodec(0)
    wait_until(lambda: codec._ready == dict.fromkeys((*ours, DType.BYTES), "auto"))
    codec.close()
    assert Codec.made[0].prepared[:2] == [(RAW, "raw"), (DType.BFLOAT16, "window")]


def test_what_cannot_be_prepared_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prepared, "WAYS", [("auto", (DType.BFLOAT16, DType.FLOAT16))])
    codec = PreparedCodec(0)
    wait_until(lambda: "cannot be compiled" in caplog.text)
    assert codec._ready == {DType.BFLOAT16: "auto"}
    codec.close()
