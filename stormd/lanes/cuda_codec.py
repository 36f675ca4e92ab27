"""The device's codec, usable from the start while most of it is still being compiled.

What stays true: a store never waits for a compiler. Until the kernels of its element type are
there, its bytes are stored raw, which the blob says of itself; a restore finds the kernels that
its blob was made with.

Where no cache on disk has them, compiling takes seconds for an element type and half a minute for
all. A daemon that were ready only then would look dead to whoever started it.
"""

from __future__ import annotations

import logging
import threading
from typing import Final

from storm_kernels.ancf.cuda import CudaCodec
from storm_kernels.ancf.cuda_launches import BlobKind
from storm_kernels.ancf.dtypes import DType
from storm_kernels.errors import KernelsError

from stormd.lanes import StoreJob

__all__ = ["DeviceCodec"]

log = logging.getLogger(__name__)

RAW: Final = DType.BYTES
"""The type as which anything can be stored raw, for which the lane's opening waits."""

ORDER: Final = (DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32, *DType)
"""What training saves most comes first."""

CLOSE_SECONDS: Final = 5.0
"""How long `close` waits for compilers, which cannot be interrupted; then they are left behind."""


class DeviceCodec:
    """Encodes and decodes on the device of that ordinal; for any thread. Needs `close`.

    Raises:
        KernelsError: the device or its compiler cannot be used.
    """

    def __init__(self, ordinal: int) -> None:
        self._codec = CudaCodec(ordinal)
        for _ in self._codec.prepare_each([RAW], modes=["raw"]):
            pass
        # Grown by the preparing thread, read by others: a set's `in` and `add` are atomic.
        self._ready: set[DType] = set()
        self._stopping = threading.Event()
        self._preparing = threading.Thread(
            target=self._prepare, name=f"stormd-cuda-{ordinal}-compile", daemon=True
        )
        self._preparing.start()

    def scratch_bytes(self, nbytes: int) -> int:
        """Return the bytes of device scratch that a part of `nbytes` of any type needs."""
        return max(self._codec.scratch_bytes(nbytes, dtype) for dtype in DType)

    def encode(
        self,
        job: StoreJob,
        source: int,
        blob: tuple[int, int],
        *,
        scratch: int,
        result: int,
        stream: int,
    ) -> None:
        """Put the encoder of a store on `stream`; `blob` is the address and size of its room.

        Three words at `result` then hold the blob's bytes, a status and the mode.
        """
        is_raw = job.codec == "raw" or job.dtype not in self._ready
        self._codec.encode_async(
            source,
            job.nbytes,
            RAW if is_raw else job.dtype,
            *blob,
            scratch,
            result,
            stream,
            mode="raw" if is_raw else "auto",
        )

    def decode(
        self,
        kind: BlobKind,
        blob: tuple[int, int],
        target: tuple[int, int],
        *,
        scratch: int,
        result: int,
        stream: int,
    ) -> None:
        """Put the decoder of a blob of that kind on `stream`; `target` is address and bytes.

        The word at `result` then is 0, or a status for `explain`.
        """
        self._codec.decode_async(
            *blob, *target, scratch, result, stream, dtype=kind.dtype, pipeline=kind.pipeline
        )

    def explain(self, status: int) -> str:
        """Return what a status of the decoder means."""
        return self._codec.explain(status)

    def close(self) -> None:
        """End the preparation after the element type that is being compiled."""
        self._stopping.set()
        self._preparing.join(CLOSE_SECONDS)

    def _prepare(self) -> None:
        try:
            for dtype in self._codec.prepare_each(ORDER):
                self._ready.add(dtype)
                if self._stopping.is_set():
                    return
        except (KernelsError, RuntimeError):
            log.exception("the codec cannot be compiled: what needs it will be stored raw")
