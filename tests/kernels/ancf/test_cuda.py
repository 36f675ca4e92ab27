"""cuda.py and its kernels on a real device: the reference's bytes, and nothing outside buffers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from storm_kernels import backends
from storm_kernels.ancf import DType, max_encoded_bytes, reference
from storm_kernels.ancf.checksum import checksum, from_sums
from storm_kernels.ancf.cuda_launches import (
    KIND_BYTES,
    PIPELINES,
    blob_kind,
    encode_kernels,
    pipeline_of,
)
from storm_kernels.ancf.layout import Mode
from storm_kernels.errors import CorruptBlob

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not backends()["cuda"].available, reason=backends()["cuda"].detail),
]

GUARD = 64
POISON = 0xA5
SIZES = (0, 1, 31, 33, 1023, 1025, 4095, 4096, 4097, 12_289, 300_001)


class Guarded:
    """Poisoned device memory whose surroundings must stay as they are."""

    def __init__(self, nbytes: int, offset: int = 0) -> None:
        self._memory = torch.full(
            (nbytes + 2 * GUARD + offset,), POISON, dtype=torch.uint8, device="cuda"
        )
        self.data = self._memory[GUARD + offset : GUARD + offset + nbytes]
        self._start = GUARD + offset

    @property
    def address(self) -> int:
        return self._memory.data_ptr() + self._start

    def check(self) -> None:
        end = self._start + self.data.numel()
        assert bool((self._memory[: self._start] == POISON).all()), (
            "bytes before the buffer written"
        )
        assert bool((self._memory[end:] == POISON).all()), "bytes after the buffer written"


@pytest.fixture(scope="module")
def codec():
    from storm_kernels.ancf.cuda import CudaCodec

    return CudaCodec()


def encode(codec, data: np.ndarray, dtype: DType, offset: int = 0, **options) -> np.ndarray:
    source = Guarded(data.size, offset)
    source.data.copy_(torch.from_numpy(data))
    target = Guarded(max_encoded_bytes(data.size, dtype))
    scratch = Guarded(codec.scratch_bytes(data.size, dtype))
    result = torch.full((3,), -1, dtype=torch.int64, device="cuda")
    codec.encode_async(
        source.address, data.size, dtype, target.address, target.data.numel(), scratch.address,
        result.data_ptr(), torch.cuda.current_stream().cuda_stream, **options,
    )  # fmt: skip
    size, status, _ = result.tolist()
    assert status == 0
    for buffer in (source, target, scratch):
        buffer.check()
    return target.data[:size].cpu().numpy()


def check_sums(codec, parts: list[np.ndarray], offset: int = 0) -> list[int]:
    """The checksums of parts, by one launch that says them in host memory, as the daemon has it."""
    from storm_kernels.cuda_driver import MappedHost

    sources = [Guarded(part.size, offset) for part in parts]
    spans, sums = MappedHost(16 * len(parts)), MappedHost(8 * len(parts) * codec.check_blocks + 8)
    for number, (source, part) in enumerate(zip(sources, parts, strict=True)):
        source.data.copy_(torch.from_numpy(part))
        spans.words()[2 * number : 2 * number + 2] = [source.address, part.size]
    stream = torch.cuda.current_stream()
    codec.check_async(spans.device_address, len(parts), sums.device_address, stream.cuda_stream)
    stream.synchronize()
    for source in sources:
        source.check()
    *words, behind = sums.words()
    assert behind == 0
    for mapped in (spans, sums):
        mapped.close()
    each = codec.check_blocks
    return [from_sums(words[each * n : each * (n + 1)], part.size) for n, part in enumerate(parts)]


def decode(
    codec, blob: np.ndarray, nbytes: int, offset: int = 0, dtype: DType | None = None,
    pipeline: str | None = None,
):  # fmt: skip
    source = Guarded(blob.size)
    source.data.copy_(torch.from_numpy(blob))
    target = Guarded(nbytes, offset)
    scratch = Guarded(codec.scratch_bytes(nbytes, DType.UINT8))
    status = torch.full((1,), -1, dtype=torch.int64, device="cuda")
    codec.decode_async(
        source.address, blob.size, target.address, nbytes, scratch.address, status.data_ptr(),
        torch.cuda.current_stream().cuda_stream, dtype=dtype, pipeline=pipeline,
    )  # fmt: skip
    outcome = int(status[0])
    for buffer in (source, target, scratch):
        buffer.check()
    return outcome, target.data.cpu().numpy()


def check(codec, data: np.ndarray, dtype: DType, offset: int = 0, **options) -> np.ndarray:
    expected = reference.encode(data, dtype, **options)
    blob = encode(codec, data, dtype, offset, **options)
    assert blob.tobytes() == expected.tobytes()
    status, same = decode(codec, expected, data.size, offset, dtype)
    assert status == 0
    assert (same == data).all()
    return blob


def samples(dtype: DType, count: int) -> dict[str, np.ndarray]:
    """Bytes of tensors of every kind that the modes are made for."""
    rng = np.random.default_rng(count + dtype)
    normal = torch.from_numpy(rng.standard_normal(count))
    kind = getattr(torch, dtype.torch_name)
    made = {
        "normal": normal,
        "relu": normal.relu(),
        "few": normal * torch.from_numpy(rng.random(count) < 0.1),
        "same": torch.ones(count, dtype=torch.float64),
        "narrow": normal.bfloat16().double(),
        "steep": normal.relu() * torch.from_numpy(2.0 ** rng.integers(-12, 1, count)),
    }
    found = {
        name: torch.empty(count, dtype=kind).copy_(values).view(torch.uint8).numpy()
        for name, values in made.items()
    }
    found["noise"] = rng.integers(0, 256, count * dtype.element_bytes, dtype=np.uint8)
    return found


@pytest.mark.parametrize("speed", ["fast", "dense"])
@pytest.mark.parametrize(
    "dtype", [DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32], ids=lambda d: d.name
)
def test_same_bytes_as_the_reference(codec, dtype, speed):
    for data in samples(dtype, 70_001).values():
        check(codec, data, dtype, speed=speed)
        for mode in ("window", "sparse", "constant", "boolean", "raw", "truncated"):
            check(codec, data, dtype, speed=speed, mode=mode)


def drawn(dtype: DType, rng: np.random.Generator) -> np.ndarray:
    """Bytes of a tensor whose size, spread, zeros, signs and low bits are drawn."""
    count = int(2 ** rng.uniform(0, 15))
    if not dtype.is_float:
        values = torch.from_numpy(rng.integers(0, int(2 ** rng.uniform(0, 31)), count))
        kept = torch.from_numpy(rng.random(count) < rng.choice([0.1, 0.5, 1]))
        return (values * kept).to(getattr(torch, dtype.torch_name)).view(torch.uint8).numpy()
    spread = rng.choice([0, 4, 8, 16, 100])
    values = rng.standard_normal(count) * 2.0 ** rng.uniform(-spread, min(spread, 8), count)
    values *= rng.random(count) < rng.choice([0.03, 0.25, 0.5, 1, 1])
    values = abs(values) if rng.random() < 0.3 else values
    values[rng.random(count) < rng.choice([0, 0, 0.001])] = np.inf
    made = torch.from_numpy(values)
    made = made.bfloat16().double() if rng.random() < 0.2 else made
    return made.to(getattr(torch, dtype.torch_name)).view(torch.uint8).numpy()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "dtype",
    [
        DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32, DType.FLOAT64, DType.FLOAT8_E5M2,
        DType.UINT8, DType.INT32, DType.INT64,
    ],
    ids=lambda d: d.name,
)  # fmt: skip
def test_tensors_of_every_kind(codec, dtype, seed):
    rng = np.random.default_rng(seed)
    for _ in range(25):
        data = drawn(dtype, rng)
        check(codec, data, dtype, speed=rng.choice(["fast", "dense"]))


@pytest.mark.parametrize("count", SIZES)
def test_sizes_and_alignment(codec, count):
    data = samples(DType.BFLOAT16, 300_001)["normal"][: 2 * count]
    for offset in (0, 2):
        check(codec, data, DType.BFLOAT16, offset)
        check(codec, data, DType.BFLOAT16, offset, mode="sparse", checksum=False)


@pytest.mark.parametrize("offset", [0, 1, 8])
def test_checksums_of_spans(codec, offset):
    rng = np.random.default_rng(offset)
    parts = [rng.integers(0, 256, size, np.uint8) for size in (*SIZES, (1 << 25) + 77)]
    assert check_sums(codec, parts, offset) == [checksum(part) for part in parts]


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT32], ids=lambda d: d.name)
def test_a_guess_of_the_pipeline_changes_no_bit_and_a_wrong_one_makes_a_raw_blob(codec, dtype):
    for count in (0, 1, 4097, 300_001):
        for name, data in samples(dtype, count).items():
            chosen = reference.encode(data, dtype)
            raw = reference.encode(data, dtype, mode="raw").tobytes()
            right = pipeline_of(Mode(int(chosen[6])).name.lower())
            for likely in PIPELINES:
                blob = encode(codec, data, dtype, likely=likely).tobytes()
                if likely == right or f"ancf_encode_{likely}" not in encode_kernels(dtype):
                    assert blob == chosen.tobytes(), (name, likely)
                else:
                    assert blob == raw or right is None, (name, likely)
                    assert blob in (raw, chosen.tobytes()), (name, likely)


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16], ids=lambda d: d.name)
@pytest.mark.parametrize("mode", ["window", "sparse"])
def test_all_patterns(codec, dtype, mode):
    data = np.random.default_rng(0).permutation(np.arange(1 << 16, dtype=np.uint16))
    check(codec, np.tile(data, 3).view(np.uint8), dtype, mode=mode)
    few = np.where(np.arange(3 << 16) % 3, np.uint16(0x3F80), np.tile(data, 3))
    check(codec, few.view(np.uint8), dtype, mode=mode, speed="dense")


def test_large_tensors_come_out_the_same_each_time(codec):
    values = torch.randn(40_000_000, device="cuda").bfloat16().view(torch.uint8).cpu().numpy()
    first = check(codec, values, DType.BFLOAT16)
    for _ in range(3):
        assert encode(codec, values, DType.BFLOAT16).tobytes() == first.tobytes()


def test_decoding_without_a_type(codec):
    data = samples(DType.FLOAT32, 9_000)["normal"]
    status, same = decode(codec, reference.encode(data, DType.FLOAT32), data.size)
    assert status == 0
    assert (same == data).all()


@pytest.mark.parametrize("speed", ["fast", "dense"])
@pytest.mark.parametrize("mode", ["window", "sparse", "raw"])
def test_one_decoder_is_enough_and_another_decodes_nothing(codec, mode, speed):
    data = samples(DType.BFLOAT16, 20_001)["few"]
    blob = reference.encode(data, DType.BFLOAT16, mode=mode, speed=speed)
    kind = blob_kind(blob[:KIND_BYTES].tobytes())
    status, same = decode(codec, blob, data.size, dtype=kind.dtype, pipeline=kind.pipeline)
    assert status == 0
    assert (same == data).all()
    for pipeline in set(PIPELINES) - {kind.pipeline}:
        status, out = decode(codec, blob, data.size, dtype=kind.dtype, pipeline=pipeline)
        assert "another" in codec.explain(status)
        assert (out == POISON).all()
    status, out = decode(codec, blob, data.size, dtype=DType.FLOAT16, pipeline=kind.pipeline)
    assert "another" in codec.explain(status)
    assert (out == POISON).all()


@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("mode", ["window", "sparse", "raw", "boolean"])
def test_damage_is_told(codec, mode, checksum):
    rng = np.random.default_rng(5)
    data = samples(DType.BFLOAT16, 20_001)["few" if mode == "sparse" else "normal"]
    blob = reference.encode(data, DType.BFLOAT16, mode=mode, speed="dense", checksum=checksum)
    for _ in range(60):
        damaged = blob.copy()
        for place in rng.integers(0, blob.size, 1 + rng.integers(3)):
            damaged[place] ^= 1 << rng.integers(8)
        cut = blob.size - (rng.integers(1, blob.size) if rng.random() < 0.2 else 0)
        status, out = decode(codec, damaged[:cut], data.size, dtype=DType.BFLOAT16)
        assert status != 0 or not checksum or (out == data).all()


def test_tensors(codec):
    from storm_kernels import ancf

    tensor = torch.randn(300, 400, device="cuda").bfloat16()
    blob = ancf.encode(tensor)
    assert blob.to_bytes() == ancf.encode(tensor.cpu()).to_bytes()
    assert torch.equal(ancf.decode(blob), tensor)
    assert torch.equal(ancf.decode(blob, device="cpu"), tensor.cpu())
    broken = blob.data.clone()
    broken[500] ^= 1
    with pytest.raises(CorruptBlob):
        ancf.decode(ancf.Blob(broken, blob.shape, blob.device))
