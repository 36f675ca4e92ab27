"""A device's codec that is usable from the start, while most of its kernels still compile.

Compiling all kernels takes long if no cache on disk has them (DESIGN.md). A daemon that waited for
that would look dead to the user who started it. So an encoder never waits for a compiler. Until the
kernels of an element type are ready, its bytes are encoded raw, as the blob's header says. Floats
are first encoded in mode window, whose kernels are compiled first. The kernels that decode a blob
are ready whenever the blob could be encoded.
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
"""The type as which any tensor can be encoded raw; its kernels are compiled first."""

ORDER: Final = (DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32, *DType)
"""Element types in order of compilation; the types that training saves most come first."""

WAYS: Final = (("window", tuple(dtype for dtype in ORDER if dtype.is_float)), ("auto", ORDER))
"""Modes in order of compilation, each with its element types."""

CLOSE_SECONDS: Final = 5.0
"""How long `close` waits for compilers, which cannot be interrupted; then they keep running."""


class PreparedCodec:
    """Encodes and decodes on the device `ordinal`; any thread may call. Needs `close`.

    A background thread compiles the kernels of all element types.

    Raises:
        KernelsError: the device or its compiler cannot be used.
    """

    def __init__(self, ordinal: int) -> None:
        self._codec = CudaCodec(ordinal)
        for _ in self._codec.prepare_each([RAW], modes=["raw"]):
            pass
        # The mode of each type with compiled kernels. The preparing thread sets it, others read it.
        self._ready: dict[DType, str] = {}
        self._stopping = threading.Event()
        name = f"ancf-{ordinal}-prepare"
        self._preparing = threading.Thread(target=self._prepare, name=name, daemon=True)
        self._preparing.start()

    def scratch_bytes(self, nbytes: int) -> int:
        """Return the bytes of device scratch for a part of `nbytes` of any element type."""
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
        """Enqueue an encoder on `stream`; `source` and `blob` are (address, bytes) of buffers.

        Afterwards three words at `result` hold the blob's bytes, a status and the mode. The mode is
        raw if the device chose another pipeline than `likely`.
        """
        mode = "raw" if raw else self._ready.get(dtype, "raw")
        kind = RAW if mode == "raw" else dtype
        self._codec.encode_async(
            *source, kind, *blob, scratch, result, stream, mode=mode, likely=likely
        )

    @property
    def check_words(self) -> int:
        """The number of words that `check` writes for each span."""
        return self._codec.check_blocks

    def check(self, spans: int, count: int, sums: int, *, stream: int) -> None:
        """Enqueue on `stream` the partial checksums of spans; see `CudaCodec.check_async`."""
        self._codec.check_async(spans, count, sums, stream)

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
        """Enqueue the decoder for a blob of that kind on `stream`; `target` is (address, bytes).

        Afterwards the word at `result` is 0, or a status for `explain`.
        """
        self._codec.decode_async(
            *blob, *target, scratch, result, stream, dtype=kind.dtype, pipeline=kind.pipeline
        )

    def explain(self, status: int) -> str:
        """Return the meaning of a decoder status."""
        return self._codec.explain(status)

    def close(self) -> None:
        """Stop compiling after the current element type; a second call is harmless."""
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
