"""Stores LMCache's keys and values losslessly compressed: a serde that is called "ancf".

Importing this file registers it. An L2 adapter asks for it in its specification:

    {"type": "fs", "base_path": "/cache", "serde": {"type": "ancf"}}

Run as a program, it puts the keys and values of a random model through LMCache's own objects, and
prints ratio and speed. It needs lmcache 0.5.6, but neither a daemon nor a GPU.
"""

import time

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc
from lmcache.v1.distributed.serde import (
    AsyncSerdeProcessor,
    Deserializer,
    Serializer,
    get_registered_serde_types,
    register_serde_factory,
)
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from storm_kernels import ancf

LENGTH_BYTES = 8
"""Before each blob: its size, since LMCache may hand back a larger buffer."""

LAYERS, TOKENS, HEADS, WIDTH = 32, 256, 8, 128
ROUNDS = 5


class AncfSerializer(Serializer):
    """Encodes a chunk of keys and values on the processor."""

    def __init__(self, threads=1):
        self._codec = ancf.host_backend()
        self._threads = threads

    def serialize(self, src, dst, key):  # noqa: ARG002 - LMCache passes it
        """Write the blob of `src` into the bytes of `dst`; return how many it takes."""
        values, room = src.tensor.contiguous(), dst.tensor.view(torch.uint8).flatten()
        size = self._codec.encode_into(
            values.data_ptr(),
            values.nbytes,
            ancf.dtype_of(values.dtype),
            room.data_ptr() + LENGTH_BYTES,
            room.nbytes - LENGTH_BYTES,
            threads=self._threads,
        )
        room[:LENGTH_BYTES].copy_(torch.tensor([size]).view(torch.uint8))
        return LENGTH_BYTES + size

    def estimate_serialized_size(self, layout_desc):
        """Return the bytes that no blob of such a chunk exceeds."""
        pairs = zip(layout_desc.shapes, layout_desc.dtypes, strict=True)
        most = (
            ancf.max_encoded_bytes(shape.numel() * dtype.itemsize, ancf.dtype_of(dtype))
            for shape, dtype in pairs
        )
        return LENGTH_BYTES + sum(most)


class AncfDeserializer(Deserializer):
    """Decodes it into LMCache's memory."""

    def __init__(self, threads=1):
        self._codec = ancf.host_backend()
        self._threads = threads

    def deserialize(self, src, dst, key):  # noqa: ARG002 - LMCache passes it
        """Write the chunk into `dst`, bit for bit, or raise CorruptBlob."""
        blob, values = src.tensor.view(torch.uint8).flatten(), dst.tensor
        size = int(blob[:LENGTH_BYTES].clone().view(torch.int64))
        if not 0 < size <= blob.nbytes - LENGTH_BYTES:
            raise ancf.CorruptBlob(f"a blob of {size} bytes in a buffer of {blob.nbytes}")
        self._codec.decode_into(
            blob.data_ptr() + LENGTH_BYTES,
            size,
            values.data_ptr(),
            values.nbytes,
            threads=self._threads,
        )


def make(options):
    """Return what LMCache runs; `options` are those beside "type"."""
    threads = int(options.get("threads", 1))
    workers = int(options.get("max_workers", 1))
    return AsyncSerdeProcessor(
        AncfSerializer(threads), AncfDeserializer(threads), max_workers=workers
    )


if "ancf" not in get_registered_serde_types():
    register_serde_factory("ancf", make)


def memory(shape, dtype):
    """Return one of LMCache's objects, of memory of its own."""
    count = shape.numel() * dtype.itemsize
    about = MemoryObjMetadata(
        shape=shape,
        dtype=dtype,
        address=0,
        phy_size=count,
        ref_count=1,
        fmt=MemoryFormat.KV_2LTD,
        shapes=[shape],
        dtypes=[dtype],
    )
    return TensorMemoryObj(torch.empty(count, dtype=torch.uint8), about, parent_allocator=None)


def keys_and_values():
    """Return what attention layers cache of random hidden states: (2, layers, tokens, width)."""
    torch.manual_seed(0)
    hidden = torch.randn(LAYERS, TOKENS, HEADS * WIDTH)
    made = [hidden @ (torch.randn(HEADS * WIDTH, HEADS * WIDTH) / 32) for _ in range(2)]
    return torch.stack(made).bfloat16()


def main():
    cache = keys_and_values()
    source, back = (memory(cache.shape, cache.dtype) for _ in range(2))
    source.tensor.copy_(cache)
    serializer, deserializer = AncfSerializer(), AncfDeserializer()
    layout = MemoryLayoutDesc(shapes=[cache.shape], dtypes=[cache.dtype])
    most = serializer.estimate_serialized_size(layout)
    stored = memory(torch.Size([most]), torch.uint8)
    seconds = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        size = serializer.serialize(source, stored, None)
        encoded = time.perf_counter()
        deserializer.deserialize(stored, back, None)
        seconds.append((encoded - begun, time.perf_counter() - encoded))
    encoding, decoding = map(min, zip(*seconds, strict=True))
    same = torch.equal(back.tensor.view(torch.int16), cache.view(torch.int16))
    bits = "the same bits" if same else "OTHER BITS"
    print(f"{cache.nbytes} bytes of keys and values as {size}: {bits}")
    store, load = (cache.nbytes / seconds / 1e9 for seconds in (encoding, decoding))
    ratio = cache.nbytes / size
    print(f"ratio {ratio:.2f}; one core: {store:.2f} GB/s to store, {load:.2f} GB/s to load")


if __name__ == "__main__":
    main()
