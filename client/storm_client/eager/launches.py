"""Launches of Triton kernels: of these the custom functions of many libraries are made.

What such a function reads is open-ended, so it is not run again. A launch of a kernel reads nothing
but what it is given: memory, numbers, a grid, and what was compiled. So it is an operation like
PyTorch's, where all that it writes to is one of these:

- memory that was allocated in this step, and that nobody has written to before;
- all of the memory of a tensor, in place: that is one of its inputs, as it was before.

To run it again is to allocate as much, or to make the inputs again in memory of their own, and to
launch the same compiled kernel with the same grid and numbers: nothing is chosen or compiled anew.

No version counts what a launch writes. So one in place is told even where it is no operation:
nothing is recomputed from what was there before.

Launches are seen in `JITFunction.run`, below heuristics and autotuning, which is exchanged while a
block is on that wants to know of them. Which memory is new only compiled code can tell, which sees
all operators (`native/launches.cpp`): without it launches are no operations.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias

import torch

from storm_client.eager.kernel_accesses import accesses_of
from storm_client.hook_stack import untraced

if TYPE_CHECKING:
    from storm_client.native import Native, _follow

__all__ = ["Kernel", "Launch", "LaunchSink", "LaunchWatch", "watch_launches"]

_TRITON: Final = "triton.runtime.jit"

_CONSTANT: Final = "constexpr"
"""What Triton says in the place of a type of what it has compiled into a kernel."""

_Layout: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]
"""Shape, strides in elements, dtype and device of a tensor in memory of its own."""

_current_node = torch._C._current_autograd_node


class Kernel:
    """A compiled kernel as a function: of the tensors that it reads, it makes those it writes."""

    def __init__(self, compiled: Any, bound: Mapping[str, Any]) -> None:
        """Find out what `compiled` does with its arguments, here `bound` to its parameters."""
        self.__name__: str = getattr(compiled, "name", "kernel")
        self._compiled = compiled
        self._arguments: list[Any] = []
        """What was compiled into it, in the order of its parameters, and None for all others."""
        self.reads: tuple[int, ...] = ()
        self.writes: tuple[int, ...] = ()
        """None of them where it is not known what it writes to."""
        self.updates: tuple[int, ...] = ()
        """Which of those it writes to it may read as well."""
        self.numbers: tuple[int, ...] = ()
        """All are places among its arguments, of which each has one."""
        self._find_accesses(bound)

    def _find_accesses(self, bound: Mapping[str, Any]) -> None:
        compiled, names = self._compiled, list(bound)
        types: Mapping[str, str] = getattr(getattr(compiled, "src", None), "signature", {})
        text = getattr(compiled, "asm", {}).get("ttir")
        if list(types) != names or not isinstance(text, str) or _has_scratch(compiled):
            return
        given = [at for at, name in enumerate(names) if types[name] != _CONSTANT]
        accesses = accesses_of(text)
        if accesses is None or accesses.taken != len(given):
            return
        pointers = {given[at] for at in accesses.pointers}
        if pointers != {at for at in given if types[names[at]].startswith("*")}:
            return
        self.reads = tuple(given[at] for at in sorted(accesses.pointers - accesses.written))
        self.writes = tuple(given[at] for at in sorted(accesses.written))
        self.updates = tuple(given[at] for at in sorted(accesses.written & accesses.read))
        self.numbers = tuple(at for at in given if at not in pointers)
        self._arguments = [one if types[name] == _CONSTANT else None for name, one in bound.items()]

    def __call__(
        self,
        *tensors: torch.Tensor,
        grid: tuple[int, int, int],
        numbers: Sequence[float],
        layouts: Sequence[_Layout | None],
    ) -> list[torch.Tensor]:
        """Launch it; return what it writes: new memory with a layout each, or one of the `tensors`.

        They are those that it writes to in place, which have no layout, and then those it reads.
        """
        rest = iter(tensors)
        with torch._C.DisableTorchFunction():
            made = [next(rest) if one is None else _allocated(*one) for one in layouts]
        arguments = self._arguments.copy()
        places = *self.writes, *self.reads, *self.numbers
        for at, value in zip(places, (*made, *rest, *numbers), strict=True):
            arguments[at] = value
        with _on(made[0].device):
            self._compiled[grid](*arguments)
        return made


class Launch(NamedTuple):
    """A launch of a kernel that has made all that it wrote to."""

    kernel: Kernel
    tensors: list[torch.Tensor]
    """What it has written to in place, and then what it has read."""
    options: dict[str, Any]
    """What else the kernel is called with to make the same again."""
    made: list[torch.Tensor]
    over: int
    """How many it has written to in place."""


class LaunchSink(Protocol):
    """Who is told of the launches of a thread."""

    @property
    def launched(self) -> Callable[..., None]:
        """Notes what a launch has made, of which it is given all that a `Launch` has."""
        ...

    def overwritten(self, tensor: torch.Tensor) -> None:
        """Note that a launch has written to memory that may have been in use."""
        ...


class LaunchWatch:
    """Tells a sink of what the thread launches in a block, between `begin` and `end`."""

    def __init__(self, follow: Native, sink: LaunchSink) -> None:
        """`follow` is the compiled module."""
        self.watcher: _follow.Launches = follow.Launches(self._run, sink)
        """Knows new memory, and is to be on while the block is."""
        self._listener = follow.launch_listener

    def begin(self) -> None:
        """Have launches be told to who listens in their thread."""
        with _LOCK:
            _LIVING.append(self)
            _exchange(self._listener)

    def end(self) -> None:
        """Tell nothing more."""
        with _LOCK:
            if self in _LIVING:
                _LIVING.remove(self)
            if not _LIVING:
                _put_back()

    def _run(
        self, run: Callable[..., Any], function: Any, arguments: Any, options: dict[str, Any]
    ) -> Any:
        """Run a function of Triton's, and tell of what it has launched."""
        grid = options["grid"]
        noted: list[tuple[Mapping[str, Any], Sequence[int]]] = []

        def note(bound: Mapping[str, Any]) -> Sequence[int]:
            size: Sequence[int] = grid(bound) if callable(grid) else grid
            noted.append((bound, size))
            return size

        compiled = run(function, *arguments, **{**options, "grid": note})
        if len(noted) == 1 and compiled is not None and _current_node() is None:
            self.watcher.tell(_kernel_of(compiled, noted[0][0]), *noted[0])
        return compiled


def watch_launches(follow: Native | None, sink: LaunchSink) -> LaunchWatch | None:
    """Return what tells `sink` of launches; None without compiled code, and without Triton."""
    if follow is None or not hasattr(sys.modules.get(_TRITON), "JITFunction"):
        return None
    return LaunchWatch(follow, sink)


_Listener: TypeAlias = Callable[[Callable[..., Any], Any, Any, dict[str, Any]], Any]

_LOCK: Final = threading.Lock()  # protects all below
_LIVING: Final[list[LaunchWatch]] = []
_exchanged: tuple[Callable[..., Any], Callable[..., Any]] | None = None
"""What `JITFunction.run` was, and what stands for it; None while that is as it was."""

_KERNEL: Final = "_storm_kernel"
"""The attribute of what was compiled that holds its `Kernel`: both are let go of together."""


def _exchange(listener: Callable[[], _Listener | None]) -> None:
    global _exchanged  # noqa: PLW0603 - there is one Triton in a process
    function: Any = sys.modules[_TRITON].JITFunction
    if _exchanged is None:
        run = function.run
        function.run = _telling(run, listener)
        _exchanged = run, function.run


def _put_back() -> None:
    global _exchanged
    function: Any = sys.modules[_TRITON].JITFunction
    if _exchanged is not None and function.run is _exchanged[1]:  # else another's stands on it
        function.run, _exchanged = _exchanged[0], None


def _telling(
    run: Callable[..., Any], listener: Callable[[], _Listener | None]
) -> Callable[..., Any]:
    """Return what runs a function of Triton's, and hands it to who listens in this thread."""

    @untraced
    def told(self: Any, *arguments: Any, **options: Any) -> Any:
        listens = listener()
        if listens is None or options.get("grid") is None or options.get("warmup"):
            return run(self, *arguments, **options)
        return listens(run, self, arguments, options)

    return told


def _kernel_of(compiled: Any, bound: Mapping[str, Any]) -> Kernel:
    attributes: dict[str, Any] = getattr(compiled, "__dict__", {})
    if _KERNEL not in attributes:
        attributes.setdefault(_KERNEL, Kernel(compiled, bound))
    return attributes[_KERNEL]  # type: ignore[no-any-return]


def _has_scratch(compiled: Any) -> bool:
    """Tell whether a kernel uses memory that it is not given as an argument."""
    sizes = ("global_scratch_size", "profile_scratch_size")
    return any(getattr(compiled.metadata, size, 0) for size in sizes)


def _allocated(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Have a device be the current one, as kernels are launched there."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
