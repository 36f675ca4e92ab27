"""The compiled modules of one device: finds the module of a kernel, and compiles each only once.

A module is one source and, if the source has several pipelines, one of them, since compiling takes
seconds (DESIGN.md). If several threads request a module, one compiles it and the others wait. Each
gets the kernel, or an error that says why it is unavailable. CuPy compiles and caches the result on
disk, in CUPY_CACHE_DIR. Processes that start together, such as the trainers of a node, take turns
at a module: one compiles it and the others find it in the cache.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from filelock import FileLock

from ..cuda_compiler import load_cupy
from ..errors import BackendUnavailable
from .cuda_launches import PIPELINES

if TYPE_CHECKING:
    from ..cuda_driver.launch import Function
    from .dtypes import DType

__all__ = ["Modules", "Preparation", "Wanted", "load_cupy", "wanted"]

MAX_COMPILERS: Final = 8
"""The maximum number of compiler threads; more would take processors from training processes."""

TURN_SECONDS: Final = 60.0
"""How long a process waits for its turn: the process that compiles may be stopped."""

_FOLDER: Final = Path(__file__).parent / "csrc" / "cuda"
_OPTIONS: Final = ("-std=c++17", f"-I{_FOLDER}")


class Wanted(NamedTuple):
    """A module: a source compiled for one kind of element, with the kernels of one pipeline."""

    source: str
    pipeline: str
    element_bytes: int
    mantissa_bits: int

    def text(self) -> str:
        """Return the text to compile; it includes a digest of the sources, for CuPy's cache."""
        return (
            f"#define ANCF_WIDTH {self.element_bytes}\n"
            f"#define ANCF_MANTISSA {self.mantissa_bits}\n"
            f"#define ANCF_PIPELINES {1 << PIPELINES.index(self.pipeline)}\n"
            f'#include "{self.source}.cu"\n'
            f"// {_source_digest()}\n"
        )


def wanted(kernel: str, dtype: DType) -> Wanted:
    """Return the module that contains the kernel `kernel` for elements of type `dtype`."""
    source, _, pipeline = kernel.rpartition("_")
    if pipeline not in PIPELINES:
        # ancf_choose and ancf_values are sources; encode_raw, check and decode_begin are in every
        # module of their source.
        source = kernel if kernel in _ALONE else _SOURCES.get(kernel, source)
        pipeline = PIPELINES[0]
    return Wanted(source, pipeline, dtype.element_bytes, dtype.mantissa_bits)


_ALONE: Final = ("ancf_choose", "ancf_values")
_SOURCES: Final = {"ancf_check": "ancf_encode"}
"""The sources of kernels whose names do not contain them."""


class Modules:
    """Compiles and loads modules on one device; any thread may call."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._lock = threading.Lock()  # protects _loaded
        self._loaded: dict[Wanted, Future[Any]] = {}

    def function(self, kernel: str, dtype: DType) -> Function:
        """Return a kernel; compiling takes seconds if no cache has it.

        Raises:
            BackendUnavailable: the kernel cannot be compiled or loaded.
        """
        from ..cuda_driver.launch import Function

        module = self.get(wanted(kernel, dtype))
        with load_cupy().cuda.Device(self._device):
            function = module.get_function(kernel)
            shared_bytes = _shared_bytes(module, kernel)
            if shared_bytes:
                function.max_dynamic_shared_size_bytes = shared_bytes
            return Function(function.kernel.ptr, shared_bytes, function)

    def get(self, which: Wanted) -> Any:
        """Return a loaded module; the first caller compiles it."""
        with self._lock:
            future = self._loaded.get(which)
            is_mine = future is None
            if future is None:
                future = self._loaded[which] = Future()
        if is_mine:
            self._load(which, future)
        return future.result()

    def prepare(self, modules: Iterable[Wanted]) -> Preparation:
        """Start to compile modules in parallel, in this order; `get` waits for one module.

        The threads are daemon threads: a compiler cannot be interrupted, and the process's exit
        need not wait for it.
        """
        queue = Preparation(modules)
        for _ in range(min(len(queue), _processors())):
            threading.Thread(
                target=self._prepare, args=(queue,), name="ancf-compile", daemon=True
            ).start()
        return queue

    def _prepare(self, queue: Preparation) -> None:
        for which in queue:
            try:
                self.get(which)
            except BackendUnavailable:
                continue  # a caller that needs the module gets the error from `get`

    def _load(self, which: Wanted, future: Future[Any]) -> None:
        try:
            future.set_result(_compiled(which, self._device))
        except BaseException as error:  # noqa: BLE001 (all who wait for it get it)
            with self._lock:
                del self._loaded[which]  # a failure by lack of memory may not recur
            future.set_exception(error)


class Preparation:
    """A queue of modules that several threads compile, each once and in order, until `end`."""

    def __init__(self, modules: Iterable[Wanted]) -> None:
        self._lock = threading.Lock()  # protects _left
        self._left = deque(dict.fromkeys(modules))

    def __len__(self) -> int:
        return len(self._left)

    def __iter__(self) -> Iterator[Wanted]:
        while (which := self._next()) is not None:
            yield which

    def end(self) -> None:
        """Start no further module; compilations in progress still complete."""
        with self._lock:
            self._left.clear()

    def _next(self) -> Wanted | None:
        with self._lock:
            return self._left.popleft() if self._left else None


def _compiled(which: Wanted, device: int) -> Any:
    cupy = load_cupy()
    try:
        with cupy.cuda.Device(device), _turn(which):
            module = cupy.RawModule(code=which.text(), options=_OPTIONS)
            module.compile()
    except Exception as error:
        raise BackendUnavailable(
            f"{which.source}.cu cannot be compiled for {which.element_bytes}-byte elements with "
            f"{which.mantissa_bits} mantissa bits, pipeline {which.pipeline}: {error}"
        ) from error
    return module


@contextmanager
def _turn(which: Wanted) -> Iterator[None]:
    """Prevent other processes that share the cache from compiling the same module meanwhile."""
    name = hashlib.sha256(which.text().encode()).hexdigest()[:16]
    try:
        folder = Path(os.environ.get("CUPY_CACHE_DIR") or Path.home() / ".cupy" / "kernel_cache")
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / f"ancf-{name}.lock", timeout=TURN_SECONDS)
        lock.acquire()
    except (OSError, RuntimeError):
        yield  # the cache cannot be shared, or the compiling process is stopped
        return
    try:
        yield
    finally:
        lock.release()


def _shared_bytes(module: Any, kernel: str) -> int:
    """Return a block's dynamic shared memory in bytes, from the module's symbol for it."""
    symbol = _SHARED_SYMBOLS.get(kernel)
    if symbol is None:
        return 0
    cupy = load_cupy()
    return int(cupy.ndarray(1, cupy.uint32, module.get_global(symbol)).get()[0])


_SHARED_SYMBOLS: Final = {
    "ancf_choose": "ancf_choose_shared_bytes",
    "ancf_values": "ancf_values_shared_bytes",
    "ancf_check": "ancf_check_shared_bytes",
    **{f"ancf_encode_{kind}": f"ancf_encode_{kind}_shared_bytes" for kind in PIPELINES},
    **{f"ancf_decode_{kind}": "ancf_decode_shared_bytes" for kind in PIPELINES},
}


def _processors() -> int:
    return min(MAX_COMPILERS, len(os.sched_getaffinity(0)))


@lru_cache(maxsize=1)
def _source_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(_FOLDER.glob("*.cu*")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]
