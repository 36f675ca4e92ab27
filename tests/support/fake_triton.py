"""A stand-in for Triton that launches functions of NumPy's, written to as kernels write: uncounted.

It has what `eager/launches.py` uses of the real one: `JITFunction.run`, and a compiled kernel with
its intermediate form, the types of its parameters, and a launch by grid.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

__all__ = ["JITFunction", "jit", "ttir"]

MODULE = SimpleNamespace()
"""Stands for `triton.runtime.jit`."""


def ttir(types: Mapping[str, str], reads: str, writes: str) -> str:
    """Return the intermediate form of a kernel that reads and writes some of its parameters."""
    kinds = {"*fp32": "!tt.ptr<f32>", "i32": "i32", "fp32": "f32"}
    taken = {name: kinds[of] for name, of in types.items() if of != "constexpr"}
    parameters = ", ".join(f'%{name}: {kind} loc("{name}"(#loc))' for name, kind in taken.items())
    lines = ["#loc = loc(unknown)", "module {", f"  tt.func public @kernel({parameters}) {{"]
    lines += ["    %zero = arith.constant 0.000000e+00 : f32 loc(#loc)"]
    for name in reads.split():
        lines.append(f"    %at_{name} = tt.addptr %{name}, %n : !tt.ptr<f32>, i32 loc(#loc)")
        lines.append(f"    %of_{name} = tt.load %at_{name} : !tt.ptr<f32> loc(#loc)")
    lines += [f"    tt.store %{name}, %zero : !tt.ptr<f32> loc(#loc)" for name in writes.split()]
    return "\n".join([*lines, "    tt.return loc(#loc)", "  } loc(#loc)", "} loc(#loc)"])


class Compiled:
    """A compiled kernel."""

    def __init__(self, function: Callable[..., None], types: dict[str, str], text: str) -> None:
        self.name = function.__name__
        self.asm = {"ttir": text}
        self.src = SimpleNamespace(signature=types)
        self.metadata = SimpleNamespace(global_scratch_size=0)
        self.launches = 0
        self._function = function

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        assert len(grid) == 3

        def launch(*arguments: Any) -> None:
            self.launches += 1
            self._function(*map(_memory, arguments))

        return launch


class JITFunction:
    """A function that compiles itself, once for all arguments."""

    def __init__(
        self, function: Callable[..., None], types: dict[str, str], reads: str, writes: str
    ) -> None:
        self.of = function
        self.compiled = Compiled(function, types, ttir(types, reads, writes))
        self._signature = inspect.signature(function)

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return lambda *arguments, **options: self.run(
            *arguments, grid=grid, warmup=False, **options
        )

    def run(self, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Compiled:
        bound = dict(self._signature.bind(*arguments, **options).arguments)
        if not warmup:
            size = grid(bound) if callable(grid) else grid
            self.compiled[(*size, 1, 1)[:3]](*bound.values())
        return self.compiled


MODULE.JITFunction = JITFunction


def jit(types: str, *, reads: str, writes: str) -> Callable[[Callable[..., None]], JITFunction]:
    """Make a kernel of a function of arrays, whose parameters have Triton's names of types."""

    def made(function: Callable[..., None]) -> JITFunction:
        names = inspect.signature(function).parameters
        kinds = dict(zip(names, types.split(), strict=True))
        return JITFunction(function, kinds, reads, writes)

    return made


def _memory(argument: Any) -> Any:
    """Return an array over a tensor's memory, of which PyTorch knows nothing, as of a kernel."""
    argument = getattr(argument, "base", argument)  # of what Triton's `reinterpret` returns
    if not isinstance(argument, torch.Tensor):
        return argument
    assert argument.is_contiguous()
    assert argument.dtype is torch.float32
    memory = (ctypes.c_float * argument.numel()).from_address(argument.data_ptr())
    return np.frombuffer(memory, np.float32).reshape(argument.shape)
