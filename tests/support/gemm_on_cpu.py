"""The kernels' code of elements as functions of the CPU, in place of launches.

tests/kernels/cuda_on_cpu makes every CUDA thread a fibre. The product itself, which only tensor
cores can run, is PyTorch's in float32; all that becomes of its sums is the kernels' own.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from filelock import FileLock
from storm_kernels.gemm import hopper, modules
from storm_kernels.gemm.jobs import Variant
from support.cuda_on_cpu import HOST, TRAPS, compile_library
from torch import Tensor

PROCESSORS = 2


class Emulated:
    """Stands in for `modules`: launches run at once. `launched` are the kernels' names."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.launched: list[str] = []
        self.library = cache(self._library)

    def tensor_map(self, matrix: Tensor, box_rows: int) -> Tensor:
        assert matrix.is_contiguous()
        assert matrix.data_ptr() % 16 == 0
        assert box_rows <= 256
        return matrix

    def launch(
        self,
        variant: Variant,
        kernel: str,
        shape: tuple[int, int],
        like: Tensor,
        arguments: tuple[Any, ...],
    ) -> None:
        self.launched.append(kernel)
        job = ctypes.byref(arguments[-1])
        library = self.library(variant)
        assert shape[0] > 0
        if kernel == "gemm_product":
            x, first, second, _ = (
                one.float() if isinstance(one, Tensor) else one for one in arguments
            )
            sums = [(x @ weight.t()).contiguous() for weight in (first, second)]
            failed = library.finish_tiles(*(ctypes.c_void_p(one.data_ptr()) for one in sums), job)
        elif kernel == "gemm_records":
            assert shape[0] % arguments[0].blocks == 0
            failed = library.records(job, shape[0] // arguments[0].blocks)
        else:
            assert shape[0] * 8 >= arguments[0].tiles
            failed = library.backward(job)
        assert not failed, "threads wait for each other for ever"

    def _library(self, variant: Variant) -> ctypes.CDLL:
        return build(self._folder, variant, "run_gemm.cpp")


def build(folder: Path, variant: Variant, source: str, *flags: str) -> ctypes.CDLL:
    """Return a source of cuda_on_cpu as a library; what another process has built is used."""
    defines = variant.defines()
    name = "_".join(str(value) for value in defines.values())
    library = folder / f"{Path(source).stem}_{name}.so"
    defined = [f"-D{define}={value}" for define, value in defines.items()]
    with FileLock(library.with_suffix(".lock"), timeout=300):
        if not library.exists():
            compile_library(
                HOST / source,
                library,
                (f"-I{HOST}", f"-I{modules.SOURCE.parent}", "-fno-strict-aliasing",
                 "-ffp-contract=off", *TRAPS, *defined, *flags),
            )  # fmt: skip
    return ctypes.CDLL(str(library))


class TensorMap(ctypes.Structure):
    """A matrix for the copies of run_gemm_hopper.cpp."""

    _fields_ = [
        ("elements", ctypes.c_void_p),
        ("rows", ctypes.c_uint64),
        ("columns", ctypes.c_uint64),
        ("pitch", ctypes.c_uint64),
        ("box_rows", ctypes.c_uint32),
    ]


def tensor_map(matrix: Tensor, box_rows: int) -> TensorMap:
    """Return the map of a matrix of 16-bit elements; keep the matrix alive."""
    return TensorMap(matrix.data_ptr(), *matrix.shape, matrix.stride(0), box_rows)


def install(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Emulated:
    """Let hopper.py take tensors on a CPU, and launch there."""
    emulated = Emulated(folder)
    monkeypatch.setattr(hopper, "modules", emulated)
    monkeypatch.setattr(hopper, "_processors", lambda _device: PROCESSORS)
    monkeypatch.setattr(hopper, "takes", takes)
    monkeypatch.setattr(hopper._Memory, "sizes", sizes)
    return emulated


def takes(x: Tensor, weights: tuple[Tensor, ...]) -> bool:
    """As hopper.takes, but for the device."""
    is_plain = x.dtype in (torch.bfloat16, torch.float16)
    return is_plain and all(hopper._is_weight(weight, x, x.shape[-1]) for weight in weights)


def sizes(memory: hopper._Memory) -> hopper.Sizes:
    return hopper.Sizes(memory._result.clone(), SimpleNamespace(synchronize=lambda: None))
