"""Launches of Triton kernels, of which the custom functions of many libraries consist.

A custom function may read anything, so it is not recomputed as a whole. A kernel launch reads only
its arguments: memory, numbers, a grid, and what was compiled into the kernel. So a launch is an
operation like PyTorch's if each memory that it writes to is one of these:

- memory that was allocated in this step, and that nobody has written to before;
- the whole memory of a tensor, in place: the tensor's former value is an input of the launch.

To recompute a launch, memory of the same layout is allocated, or the launch's inputs are recomputed
in memory of their own. Then the same compiled kernel runs with the same grid and numbers: nothing
is chosen or compiled anew.

No version counts what a launch writes. So a launch in place is reported even where it is not an
operation: nothing may then be recomputed from the former contents.

Launches are seen in `JITFunction.run`, below heuristics and autotuning. That method is replaced
while a block is on that needs to know of launches. Only compiled code, which sees all operators,
knows which memory is new (`native/launches.cpp`). Without it launches are not operations.
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
"""Triton's mark, in place of a type, for an argument that is compiled into a kernel."""

_Layout: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]
"""Shape, strides in elements, dtype and device of a tensor in memory of its own."""

_current_node = torch._C._current_autograd_node


class Kernel:
    """A compiled kernel as a function from the tensors that it reads to those that it writes."""

    def __init__(self, compiled: Any, bound: Mapping[str, Any]) -> None:
        """Find out what `compiled` does with its arguments, here `bound` to its parameters."""
        self.__name__: str = getattr(compiled, "name", "kernel")
        self._compiled = compiled
        self._arguments: list[Any] = []
        """The arguments compiled into it, in the order of its parameters; None for all others."""
        self.reads: tuple[int, ...] = ()
        """Places of the arguments that it only reads; the three below hold places, too."""
        self.writes: tuple[int, ...] = ()
        """Those that it writes to; empty where that is not known."""
        self.updates: tuple[int, ...] = ()
        """Those among `writes` that the kernel may read as well."""
        self.numbers: tuple[int, ...] = ()
        """Those that are neither memory nor compiled into it."""
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
        """Launch the kernel; return the tensors that it writes, one for each of `layouts`.

        A tensor with a layout is new memory; None stands for one of `tensors`, written in place.
        `tensors` are those written in place, and then those that are only read.
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
    """A kernel launch that is an operation: it has made all of the memory that it wrote to."""

    kernel: Kernel
    tensors: list[torch.Tensor]
    """The tensors that it has written in place, and then those that it has only read."""
    options: dict[str, Any]
    """The keyword arguments of the kernel to recompute the launch."""
    made: list[torch.Tensor]
    over: int
    """The number of tensors written in place."""


class LaunchSink(Protocol):
    """Receives the launches of a thread."""

    def launched(
        self,
        kernel: Kernel,
        tensors: list[torch.Tensor],
        options: dict[str, Any],
        made: list[torch.Tensor],
        over: int,
        /,
    ) -> None:
        """Record the results of a launch; for the arguments see `Launch`."""

    def overwritten(self, tensor: torch.Tensor, /) -> None:
        """Record that a launch has written to memory that may have been in use."""


class LaunchWatch:
    """Reports the launches of a thread in a block to a sink, between `begin` and `end`."""

    def __init__(self, follow: Native, sink: LaunchSink) -> None:
        """`follow` is the compiled module."""
        self.watcher: _follow.Launches = follow.Launches(self._run, sink)
        """Knows which memory is new; has to be on while the block is."""
        self._listener = follow.launch_listener

    def begin(self) -> None:
        """Start reporting launches to the listener of their thread."""
        with _LOCK:
            _LIVING.append(self)
            _exchange(self._listener)

    def end(self) -> None:
        """Stop reporting."""
        with _LOCK:
            if self in _LIVING:
                _LIVING.remove(self)
            if not _LIVING:
                _put_back()

    def _run(
        self, run: Callable[..., Any], function: Any, arguments: Any, options: dict[str, Any]
    ) -> Any:
        """Run a Triton function, and report its launch."""
        grid = options["grid"]
        noted: list[tuple[Mapping[str, Any], Sequence[int]]] = []

        def note(bound: Mapping[str, Any]) -> Sequence[int]:
            size: Sequence[int] = grid(bound) if callable(grid) else grid
            noted.append((bound, size))
            return size

        compiled = run(function, *arguments, **{**options, "grid": note})
        if len(noted) == 1 and compiled is not None and _current_node() is None:
            self.watcher.report(_kernel_of(compiled, noted[0][0]), *noted[0])
        return compiled


def watch_launches(follow: Native | None, sink: LaunchSink) -> LaunchWatch | None:
    """Return a watch that reports launches to `sink`; None without compiled code or Triton."""
    if follow is None or not hasattr(sys.modules.get(_TRITON), "JITFunction"):
        return None
    return LaunchWatch(follow, sink)


_Listener: TypeAlias = Callable[[Callable[..., Any], Any, Any, dict[str, Any]], Any]

_LOCK: Final = threading.Lock()  # protects all below
_LIVING: Final[list[LaunchWatch]] = []
_exchanged: tuple[Callable[..., Any], Callable[..., Any]] | None = None
"""The original `JITFunction.run` and its replacement; None while it is not replaced."""

_KERNEL: Final = "_storm_kernel"
"""The attribute of a compiled kernel that holds its `Kernel`, so that both are freed together."""


def _exchange(listener: Callable[[], _Listener | None]) -> None:
    global _exchanged  # noqa: PLW0603 - there is one Triton in a process
    function: Any = sys.modules[_TRITON].JITFunction
    if _exchanged is None:
        run = function.run
        function.run = _reporting(run, listener)
        _exchanged = run, function.run


def _put_back() -> None:
    global _exchanged
    function: Any = sys.modules[_TRITON].JITFunction
    if _exchanged is not None and function.run is _exchanged[1]:  # else another wraps ours
        function.run, _exchanged = _exchanged[0], None


def _reporting(
    run: Callable[..., Any], listener: Callable[[], _Listener | None]
) -> Callable[..., Any]:
    """Return a replacement for `run` that passes the call to the listener of this thread."""

    @untraced
    def reported(self: Any, *arguments: Any, **options: Any) -> Any:
        listens = listener()
        if listens is None or options.get("grid") is None or options.get("warmup"):
            return run(self, *arguments, **options)
        return listens(run, self, arguments, options)

    return reported


def _kernel_of(compiled: Any, bound: Mapping[str, Any]) -> Kernel:
    attributes: dict[str, Any] = getattr(compiled, "__dict__", {})
    if _KERNEL not in attributes:
        attributes.setdefault(_KERNEL, Kernel(compiled, bound))
    return attributes[_KERNEL]  # type: ignore[no-any-return]


def _has_scratch(compiled: Any) -> bool:
    """Return whether a kernel uses memory that is not among its arguments."""
    sizes = ("global_scratch_size", "profile_scratch_size")
    return any(getattr(compiled.metadata, size, 0) for size in sizes)


def _allocated(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Make a device the current one, since kernels are launched there."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
