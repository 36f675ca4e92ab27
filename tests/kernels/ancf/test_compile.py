"""The command that compiles ahead: every type by name, and no guess where a name is wrong."""

from __future__ import annotations

import re

import pytest
from storm_kernels.ancf import DType
from storm_kernels.ancf import compile as command


class Codec:
    """Stands in for CudaCodec: is ready at once, and says what it was asked for."""

    asked: list[DType]

    def prepare_each(self, dtypes: list[DType]) -> list[DType]:
        Codec.asked = dtypes
        return dtypes


@pytest.fixture(autouse=True)
def codec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "CudaCodec", Codec)


def test_types_are_compiled_in_the_order_given(capsys: pytest.CaptureFixture[str]) -> None:
    command.main([])
    assert Codec.asked == list(DType)
    assert capsys.readouterr().out.count(" s\n") == len(DType)
    command.main(["float32", "bfloat16"])
    assert Codec.asked == [DType.FLOAT32, DType.BFLOAT16]
    assert re.match(r"float32: \d+\.\d s\nbfloat16:", capsys.readouterr().out)
    with pytest.raises(SystemExit, match="float12; there are bytes, bfloat16"):
        command.main(["float12"])
