"""Whatever a device may decide about a tensor, the kernel that does it is among those launched."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import storm_kernels.ancf
from storm_kernels.ancf import DType, Mode, reference
from storm_kernels.ancf.cuda_launches import (
    ALL_PIPELINES,
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


def test_a_raw_copy_takes_two_launches_and_the_usual_tensor_five() -> None:
    plan = encoding(1 << 20, DType.BFLOAT16, "raw", "fast", "adaptive", 264)
    assert [one.kernel for one in plan.launches] == ["ancf_choose", "ancf_encode_whole"]
    plan = encoding(1 << 20, DType.BFLOAT16, "auto", "fast", "adaptive", 264)
    assert len(plan.launches) == 5


def test_a_likely_pipeline_takes_its_encoder_alone_and_what_copies_where_it_is_not() -> None:
    for likely in ("fast", "bitmap", "whole"):
        plan = encoding(1 << 20, DType.BFLOAT16, "auto", "fast", "adaptive", 264, likely)
        wanted = ["ancf_choose", f"ancf_encode_{likely}", "ancf_encode_raw"]
        assert [one.kernel for one in plan.launches] == wanted
        assert plan.launched == PIPELINES.index(likely)
    for mode, likely in (("auto", "dense"), ("raw", "whole")):  # which is none of those that may be
        plan = encoding(1 << 20, DType.BFLOAT16, mode, "fast", "adaptive", 264, likely)
        assert plan == encoding(1 << 20, DType.BFLOAT16, mode, "fast", "adaptive", 264)
        assert plan.launched == ALL_PIPELINES


def test_a_large_tensor_takes_all_blocks_and_a_small_one_few() -> None:
    large = encoding(1 << 28, DType.BFLOAT16, "auto", "fast", "adaptive", 264)
    assert {one.blocks for one in large.launches[1:]} == {264}
    small = encoding(3 << 13, DType.BFLOAT16, "auto", "fast", "adaptive", 264)
    assert {one.blocks for one in small.launches[1:]} == {1}


@pytest.mark.parametrize("kernel", TAKEN)
def test_a_kernel_is_given_the_parameters_that_its_source_names(kernel: str) -> None:
    signature = re.search(rf"\n{kernel}\((.*?)\)", SOURCES, re.DOTALL)
    assert signature is not None
    declared = [parameter.rsplit(None, 1) for parameter in signature[1].split(",")]
    names = [name.lstrip("*") for _, name in declared]
    assert names == list(TAKEN[kernel])
    kinds = ENCODE_ARGUMENTS | DECODE_ARGUMENTS | CHECK_ARGUMENTS
    for (kind, name), argument in zip(declared, names, strict=True):
        is_word = kind.strip() == "u32" and not name.startswith("*")
        assert kinds[argument] == ("I" if is_word else "Q"), argument


def test_every_kernel_takes_arguments_of_one_call() -> None:
    assert {f"ancf_{way}_{kind}" for way in ("encode", "decode") for kind in PIPELINES} < set(TAKEN)
    assert TAKEN["ancf_encode_fast"][-1] == "unit_tiles"


def test_names_that_do_not_exist_are_refused() -> None:
    with pytest.raises(UsageError, match="speed 'slow'"):
        encoding(16, DType.BFLOAT16, "auto", "slow", "adaptive", 1)
    with pytest.raises(CorruptBlob, match="element type 250"):
        blob_kind(bytes(7) + b"\xfa" + bytes(8))
