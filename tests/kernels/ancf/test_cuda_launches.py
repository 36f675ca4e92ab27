"""Whatever a device may decide about a tensor, the kernel that does it is among those launched."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import storm_kernels.ancf
from storm_kernels.ancf import DType, Mode, reference
from storm_kernels.ancf.cuda_launches import (
    CHECK_ARGUMENTS,
    DECODE_ARGUMENTS,
    ENCODE_ARGUMENTS,
    KIND_BYTES,
    PIPELINES,
    TAKEN,
    blob_kind,
    decode_kernels,
    encode_kernels,
    encoding,
)
from storm_kernels.ancf.options import SPEEDS
from storm_kernels.errors import CorruptBlob, UsageError

FOLDER = Path(storm_kernels.ancf.__file__).parent / "csrc" / "cuda"
SOURCES = "".join(path.read_text() for path in FOLDER.glob("*.cu"))
MODES = ("auto", *(mode.name.lower() for mode in Mode))


def samples(dtype: DType) -> list[np.ndarray]:
    """Bytes of tensors that different modes suit."""
    rng = np.random.default_rng(dtype)
    normal = rng.standard_normal(5000).astype(np.float32)
    kinds = [normal, np.maximum(normal, 0), normal * (rng.random(5000) < 0.05), np.ones(5000)]
    found = [values.astype(np.float32).view(np.uint8)[: 4096 * 4] for values in kinds]
    found += [(values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
              for values in kinds]  # fmt: skip
    found.append(rng.integers(0, 256, 8192, dtype=np.uint8))
    found.append(rng.integers(0, 2, 8192, dtype=np.uint8))
    return [data[: data.size // 16 * 16] for data in found]


@pytest.mark.parametrize("speed", SPEEDS)
@pytest.mark.parametrize("mode", MODES)
def test_the_kernels_of_every_outcome_are_launched(mode: str, speed: str) -> None:
    for dtype in (DType.BFLOAT16, DType.FLOAT32, DType.INT16, DType.BOOL, DType.BYTES):
        for data in samples(dtype):
            header = reference.encode(data, dtype, mode=mode, speed=speed)[:KIND_BYTES]
            kind = blob_kind(header.tobytes())
            assert kind.dtype is dtype
            encoders = encode_kernels(dtype, mode, speed)
            copied = "ancf_encode_raw" in encoders and header[6] in (Mode.RAW, Mode.CONSTANT)
            assert copied or f"ancf_encode_{kind.pipeline}" in encoders
            assert f"ancf_decode_{kind.pipeline}" in decode_kernels(dtype, mode, speed)


def test_kernels_are_given_the_parameters_that_their_sources_name() -> None:
    assert {f"ancf_{way}_{kind}" for way in ("encode", "decode") for kind in PIPELINES} < set(TAKEN)
    kinds = ENCODE_ARGUMENTS | DECODE_ARGUMENTS | CHECK_ARGUMENTS
    for kernel, taken in TAKEN.items():
        signature = re.search(rf"\n{kernel}\((.*?)\)", SOURCES, re.DOTALL)
        assert signature is not None, kernel
        declared = [parameter.rsplit(None, 1) for parameter in signature[1].split(",")]
        names = [name.lstrip("*") for _, name in declared]
        assert names == list(taken)
        for (kind, name), argument in zip(declared, names, strict=True):
            is_word = kind.strip() == "u32" and not name.startswith("*")
            assert kinds[argument] == ("I" if is_word else "Q"), argument


def test_names_that_do_not_exist_are_refused() -> None:
    with pytest.raises(UsageError, match="speed 'slow'"):
        encoding(16, DType.BFLOAT16, "auto", "slow", "adaptive", 1)
    with pytest.raises(CorruptBlob, match="element type 250"):
        blob_kind(bytes(7) + b"\xfa" + bytes(8))
