"""The device's codec, usable from the start while most of it is still being compiled.

What stays true: a store never waits for a compiler. Until the kernels of its element type are
there, its bytes are stored raw, which the blob says of itself; a restore finds the kernels that
its blob was made with.

Where no cache on disk has them, compiling takes a second or two for the kernels of dense tensors,
and up to half a minute for those of sparse and truncated ones. So floats are coded as dense ones
first. A daemon that were ready only when all is would look dead to whoever started it.
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

WAYS: Final = (("window", tuple(dtype for dtype in ORDER if dtype.is_float)), ("auto", ORDER))
"""In which mode tensors of which types are encoded, as soon as that can be done."""

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
        # The mode for each type that has one. Set by the preparing thread, read by others.
        self._ready: dict[DType, str] = {}
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
        mode = "raw" if job.codec == "raw" else self._ready.get(job.dtype, "raw")
        dtype = RAW if mode == "raw" else job.dtype
        self._codec.encode_async(
            source, job.nbytes, dtype, *blob, scratch, result, stream, mode=mode
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
            for mode, dtypes in WAYS:
                for dtype in self._codec.prepare_each(dtypes, modes=[mode]):
                    self._ready[dtype] = mode
                    if self._stopping.is_set():
                        return
        except (KernelsError, RuntimeError):
            log.exception("the codec cannot be compiled: what needs it will be stored raw")
