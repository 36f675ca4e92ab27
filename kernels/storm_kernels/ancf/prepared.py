"""A device's codec, usable from the start while most of it is still to be compiled.

Compiling all kernels takes long where no cache on disk has them (DESIGN.md), and a daemon that was
ready only then would look dead to whoever started it. So whoever encodes never waits for a
compiler: until the kernels of an element type are there its bytes are encoded raw, which the blob
says of itself, and floats are coded as dense ones first, whose kernels are compiled soonest. A
decoder finds the kernels that its blob was made with.
"""

from __future__ import annotations

import logging
import threading
from typing import Final

from ..errors import KernelsError
from .cuda import CudaCodec
from .cuda_launches import BlobKind
from .dtypes import DType

__all__ = ["PreparedCodec"]

log = logging.getLogger(__name__)

RAW: Final = DType.BYTES
"""The type as which anything can be encoded raw, which is compiled before all else."""

ORDER: Final = (DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32, *DType)
"""What training saves most comes first."""

WAYS: Final = (("window", tuple(dtype for dtype in ORDER if dtype.is_float)), ("auto", ORDER))
"""In which mode tensors of which types are encoded, as soon as that can be done."""

CLOSE_SECONDS: Final = 5.0
"""How long `close` waits for compilers, which cannot be interrupted; then they are left behind."""


class PreparedCodec:
    """Encodes and decodes on the device of that ordinal; for any thread. Needs `close`.

    Prepares all element types by itself.

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
        name = f"ancf-{ordinal}-prepare"
        self._preparing = threading.Thread(target=self._prepare, name=name, daemon=True)
        self._preparing.start()

    def scratch_bytes(self, nbytes: int) -> int:
        """Return the bytes of device scratch that a part of `nbytes` of any type needs."""
        return max(self._codec.scratch_bytes(nbytes, dtype) for dtype in DType)

    def encode(
        self,
        source: tuple[int, int],
        dtype: DType,
        blob: tuple[int, int],
        *,
        raw: bool,
        scratch: int,
        result: int,
        stream: int,
        likely: str | None = None,
    ) -> None:
        """Put an encoder on `stream`; `source` and `blob` are address and bytes, of room for it.

        Three words at `result` then hold the blob's bytes, a status and the mode, which is raw
        where another pipeline was chosen than the one that is `likely` to be.
        """
        mode = "raw" if raw else self._ready.get(dtype, "raw")
        kind = RAW if mode == "raw" else dtype
        self._codec.encode_async(
            *source, kind, *blob, scratch, result, stream, mode=mode, likely=likely
        )

    @property
    def check_words(self) -> int:
        """How many words `check` leaves for each span."""
        return self._codec.check_blocks

    def check(self, spans: int, count: int, sums: int, *, stream: int) -> None:
        """Put on `stream` what reads spans for their checksums; see `CudaCodec.check_async`."""
        self._codec.check_async(spans, count, sums, stream)

    def is_ready(self, dtype: DType) -> bool:
        """Tell whether all is there to encode such elements, and to decode what comes of it."""
        return self._ready.get(dtype) == WAYS[-1][0]

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
        """End the preparation after the element type that is being compiled. Twice is fine."""
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
