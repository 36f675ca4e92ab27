"""The example for LMCache, with the real package or, where that is missing, a stand-in."""

from __future__ import annotations

import inspect
import runpy
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from storm_kernels import ancf
from support import lmcache_stand_in

EXAMPLE = Path(__file__).parents[2] / "client" / "examples" / "lmcache_ancf.py"
HAS_LMCACHE = find_spec("lmcache") is not None


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    if not HAS_LMCACHE:
        monkeypatch.setattr(lmcache_stand_in, "FACTORIES", {})
        for name, module in lmcache_stand_in.modules().items():
            monkeypatch.setitem(sys.modules, name, module)
    return SimpleNamespace(**runpy.run_path(str(EXAMPLE)))


def _stored(example: SimpleNamespace, cache: torch.Tensor) -> tuple[Any, int]:
    source = example.memory(cache.shape, cache.dtype)
    source.tensor.copy_(cache)
    layout = example.MemoryLayoutDesc(shapes=[cache.shape], dtypes=[cache.dtype])
    serializer = example.AncfSerializer()
    most = serializer.estimate_serialized_size(layout)
    stored = example.memory(torch.Size([most]), torch.uint8)
    return stored, serializer.serialize(source, stored, None)


@pytest.mark.parametrize(
    ("dtype", "is_narrowed"),
    [(torch.bfloat16, True), (torch.float16, False), (torch.float8_e4m3fn, True)],
)
def test_keys_and_values_come_back_bit_for_bit_and_damage_is_found(
    dtype: torch.dtype, is_narrowed: bool, example: SimpleNamespace
) -> None:
    cache = torch.randn(2, 3, 17, 64).to(dtype)
    stored, size = _stored(example, cache)
    if is_narrowed:  # as LMCache stores it; an adapter may hand back the whole buffer, too
        stored.set_used_size(size)
    back = example.memory(cache.shape, cache.dtype)
    for at in (0, 9, size // 2):
        stored.raw_data[at] ^= 0xFF
        with pytest.raises(ancf.CorruptBlob):
            example.AncfDeserializer().deserialize(stored, back, None)
        stored.raw_data[at] ^= 0xFF
    example.AncfDeserializer().deserialize(stored, back, None)
    assert torch.equal(back.tensor.view(torch.uint8), cache.view(torch.uint8))


def test_it_is_registered_and_as_a_program_it_prints_ratio_and_speed(
    example: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert example.get_registered_serde_types().count("ancf") == 1
    processor = example.make({"threads": 2})
    assert isinstance(processor, example.AsyncSerdeProcessor)
    processor.close()
    example.main()
    printed = capsys.readouterr().out
    assert "the same bits" in printed
    assert "GB/s to load" in printed


@pytest.mark.skipif(not HAS_LMCACHE, reason="lmcache is not installed")
def test_the_stand_in_takes_what_the_package_takes() -> None:
    for name, module in lmcache_stand_in.modules().items():
        for member, ours in vars(module).items():
            theirs = getattr(import_module(name), member, None)
            if member.startswith("__") or not callable(ours):
                continue
            wanted = inspect.signature(ours).parameters
            assert list(wanted) == list(inspect.signature(theirs).parameters)[: len(wanted)] or (
                set(wanted) <= set(inspect.signature(theirs).parameters)
            )
