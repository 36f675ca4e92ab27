"""A device's codec, usable from the start while most of it is still to be compiled.

Compiling all kernels takes long where no cache on disk has them (DESIGN.md), and a daemon that was
ready only then would look dead to whoever started it. So whoever encodes never waits for a
compiler: until the kernels of an element type are there its bytes are encoded raw, which the blob
says of itself, and floats are coded as dense ones first, whose kernels are compiled soonest. A
decoder finds the kernels that its blob was made with.

A training process prepares what it asks for, and has it compiled by another process: compilers'
threads would slow its own down, and none may run when it ends.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
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

    Prepares all element types by itself, or with `on_demand` those that are wanted.

    Raises:
        KernelsError: the device or its compiler cannot be used.
    """

    def __init__(self, ordinal: int, *, on_demand: bool = False) -> None:
        self._codec = CudaCodec(ordinal)
        for _ in self._codec.prepare_each([RAW], modes=["raw"]):
            pass
        # The mode for each type that has one. Set by the preparing thread, read by others.
        self._ready: dict[DType, str] = {}
        self._stopping = threading.Event()
        self._lock = threading.Lock()  # protects what is wanted, and the compiler's start and end
        self._wanted: set[DType] = set()
        self._compiler: subprocess.Popen[bytes] | None = None
        self._preparing: threading.Thread | None = None
        self._name = f"ancf-{ordinal}-prepare"
        if not on_demand:
            self._start(self._prepare)

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
    ) -> None:
        """Put an encoder on `stream`; `source` and `blob` are address and bytes, of room for it.

        Three words at `result` then hold the blob's bytes, a status and the mode.
        """
        mode = "raw" if raw else self._ready.get(dtype, "raw")
        kind = RAW if mode == "raw" else dtype
        self._codec.encode_async(*source, kind, *blob, scratch, result, stream, mode=mode)

    @property
    def check_words(self) -> int:
        """How many words `check` leaves for each span."""
        return self._codec.check_blocks

    def check(self, spans: int, count: int, sums: int, *, stream: int) -> None:
        """Put on `stream` what reads spans for their checksums; see `CudaCodec.check_async`."""
        self._codec.check_async(spans, count, sums, stream)

    def want(self, dtype: DType) -> None:
        """Begin to prepare a type if nobody has; one at a time, so it may have to be wanted again.

        What cannot be prepared is logged, once, and never becomes ready.
        """
        with self._lock:
            is_busy = self._preparing is not None and self._preparing.is_alive()
            if dtype in self._wanted or is_busy or self._stopping.is_set():
                return
            self._wanted.add(dtype)
            self._start(partial(self._prepare_one, dtype))

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
        with self._lock:
            self._stopping.set()
            if self._compiler is not None:
                self._compiler.kill()
        if self._preparing is not None:
            self._preparing.join(CLOSE_SECONDS)

    def _start(self, work: Callable[[], None]) -> None:
        self._preparing = threading.Thread(target=work, name=self._name, daemon=True)
        self._preparing.start()

    def _prepare_one(self, dtype: DType) -> None:
        """Compile for one type in another process, and load what that has left on disk."""
        self._compile(dtype)
        if self._stopping.is_set():
            return
        try:
            for _ in self._codec.prepare_each([dtype]):
                self._ready[dtype] = "auto"
        except (KernelsError, RuntimeError):
            log.exception("the codec cannot be compiled for %s", dtype.name.lower())

    def _compile(self, dtype: DType) -> None:
        """Compile for a type in another process; what fails there is tried here, and told."""
        with self._lock:
            if self._stopping.is_set():
                return
            self._compiler = subprocess.Popen(  # noqa: S603 - our own module
                _command(dtype),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        self._compiler.wait()

    def _prepare(self) -> None:
        try:
            for mode, dtypes in WAYS:
                for dtype in self._codec.prepare_each(dtypes, modes=[mode]):
                    self._ready[dtype] = mode
                    if self._stopping.is_set():
                        return
        except (KernelsError, RuntimeError):
            log.exception("the codec cannot be compiled: what needs it will be stored raw")


def _command(dtype: DType) -> list[str]:
    """Return the command that leaves the kernels of a type in the cache on disk."""
    return [sys.executable, "-m", "storm_kernels.ancf.compile", dtype.name.lower()]
