"""The loss' kernels: run on a CPU by tests/kernels/cuda_on_cpu, and compiled for devices.

Whether they have PyTorch's bits only a device can show: tests/client/test_losses.py.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from storm_kernels.loss import cuda
from support.cuda_on_cpu import HOST, TRAPS, compile_library
from torch import Tensor

KINDS = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
ORDERS = ("strided", "vectors", "shifted")
ROWS = 3
GUARD = 64


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if shutil.which("g++") is None:
        pytest.skip("no g++ here")
    library = tmp_path_factory.mktemp("loss") / "loss.so"
    compile_library(
        HOST / "run_loss.cpp",
        library,
        (f"-I{HOST}", "-fno-strict-aliasing", "-ffp-contract=off", *TRAPS),
    )
    return ctypes.CDLL(str(library))


def placed(values: Tensor, offset: int) -> tuple[Tensor, Tensor]:
    """Return poisoned memory and in it a copy of values, so many elements past 16 bytes."""
    memory = torch.full((values.numel() + 2 * GUARD + 16,), 77.0, dtype=values.dtype)
    skipped = -memory.data_ptr() % 16 // memory.itemsize
    copy = memory[GUARD + skipped + offset :][: values.numel()].view(values.shape)
    copy.copy_(values)
    return memory, copy


def pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


Forward = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]]


@pytest.fixture
def forward(kernels: ctypes.CDLL) -> Forward:
    """Run the forward kernel in the order of PyTorch, or in a given one."""

    def run(logits: Tensor, classes: Tensor, shift: int) -> tuple[Tensor, Tensor, Tensor]:
        kind = next(name for name, dtype in KINDS.items() if dtype == logits.dtype)
        rows, count = logits.shape
        found = [torch.full((rows,), 77.0) for _ in range(3)]
        order = ORDERS.index(cuda.order(count, shift, 49152))
        status = getattr(kernels, f"forward_{kind}")(
            order, pointer(logits), pointer(classes), *map(pointer, found),
            ctypes.c_longlong(rows), ctypes.c_longlong(count), ctypes.c_uint(shift),
        )  # fmt: skip
        assert status == 0
        return found[0], found[1], found[2]

    return run


COUNTS = [2049, 9216, 9217, 9220, 12256, 12257, 20_003]


@pytest.mark.parametrize("kind", KINDS)
def test_each_logit_is_added_once(forward: Forward, kind: str) -> None:
    """Exponentials of 1 and 0, whose sum is exact in any order."""
    for count in COUNTS:
        torch.manual_seed(count)
        counted = torch.rand(ROWS, count) < 0.7
        logits = torch.where(counted, 5.0, -torch.inf).to(KINDS[kind])
        classes = counted.long().argmax(1)
        for offset in range(4) if kind == "f32" else (0, 4):
            _, placed_logits = placed(logits, offset)
            shift = offset if kind == "f32" else 0
            picked, largest, log_total = forward(placed_logits, classes, shift)
            expected = torch.from_numpy(np.log(counted.sum(1).numpy().astype(np.float32)))
            assert torch.equal(largest, torch.full((ROWS,), 5.0))
            torch.testing.assert_close(log_total, expected, rtol=2e-7, atol=0)
            assert torch.equal(picked, 0 - log_total), (count, offset)


@pytest.mark.parametrize("kind", KINDS)
def test_the_log_probability_is_that_of_the_class(forward: Forward, kind: str) -> None:
    for count in COUNTS:
        torch.manual_seed(count)
        logits = (torch.randn(ROWS, count) * 3).to(KINDS[kind])
        classes = torch.tensor([0, count - 1, count // 2])
        _, placed_logits = placed(logits, 0)
        picked, largest, _ = forward(placed_logits, classes, 0)
        expected = logits.double().log_softmax(1).gather(1, classes[:, None])[:, 0]
        assert torch.equal(largest, logits.float().amax(1))
        torch.testing.assert_close(picked.double(), expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 7, 8, 2049, 4099])
def test_the_gradient_is_right_wherever_it_lies(
    kernels: ctypes.CDLL, kind: str, count: int
) -> None:
    torch.manual_seed(count)
    logits = (torch.randn(ROWS, count) * 3).to(KINDS[kind])
    classes = torch.tensor([0, count - 1, count // 2])
    gradient = torch.tensor([1.0, -0.25, 0.0])
    log_probs = logits.double().log_softmax(1)
    spread = torch.zeros_like(log_probs).scatter_(1, classes[:, None], gradient.double()[:, None])
    expected = (spread - log_probs.exp() * spread.sum(1, keepdim=True)).to(KINDS[kind])
    largest = logits.float().amax(1)
    log_total = (logits.double() - largest[:, None]).exp().sum(1).log().float()
    for offset, out_offset in ((0, 0), (1, 1), (3, 0), (0, 5), (5, None)):
        memory, source = placed(logits, offset)
        target_memory, target = memory, source
        if out_offset is not None:
            target_memory, target = placed(torch.zeros_like(logits), out_offset)
        begin = (target.data_ptr() - target_memory.data_ptr()) // target.itemsize
        status = getattr(kernels, f"backward_{kind}")(
            pointer(source), pointer(classes), pointer(gradient), pointer(largest),
            pointer(log_total), pointer(target), ctypes.c_longlong(ROWS), ctypes.c_longlong(count),
        )  # fmt: skip
        assert status == 0
        torch.testing.assert_close(
            target, expected, rtol=1e-2 if kind != "f32" else 1e-4, atol=1e-6
        )
        assert (target_memory[:begin] == 77).all()
        assert (target_memory[begin + target.numel() :] == 77).all()


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no CUDA compiler (nvcc) here")
@pytest.mark.parametrize("target", [pytest.param("sm_80", marks=pytest.mark.slow), "sm_90"])
def test_it_compiles_for_devices(tmp_path: Path, target: str) -> None:
    options = [f"-I{cuda.SOURCE.parent}", "-std=c++17", f"-arch={target}"]
    output = tmp_path / "loss.cubin"
    subprocess.run(
        ["nvcc", *options, "-Xptxas=-O0", "-cubin", "-o", output, cuda.SOURCE],
        check=True,
        timeout=300,
    )
    for kind in KINDS:
        assert f"loss_backward_{kind}".encode() in output.read_bytes()
        for order in ORDERS:
            assert f"loss_forward_{order}_{kind}".encode() in output.read_bytes()
