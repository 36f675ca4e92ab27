"""The CUDA sources compile for real devices, where nvcc is; that needs no GPU.

Without it, test_cuda_on_cpu.py still runs the sources through the C++ compiler.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from storm_kernels.ancf import DType, cuda_modules
from storm_kernels.ancf.cuda_launches import PIPELINES
from support.cuda_on_cpu import HOST, SOURCES

KERNELS = [
    "ancf_choose", "ancf_values",
    *(f"ancf_{way}_{pipeline}" for way in ("encode", "decode") for pipeline in PIPELINES),
]  # fmt: skip
FIRST_KERNELS = ("ancf_choose", "ancf_decode_begin")  # of a call, which are launched in turn
ACTION = re.compile(r"\b(ld|st|atom|red|cp)\.[\w.]*global|\bret\b|\bcall")  # in PTX
OPERATIONS = HOST / "device_operations.cu"  # a test's own, compiled like the kernels

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="no CUDA compiler (nvcc) here"),
]


def compile_with_nvcc(source: Path, target: str, output: Path) -> None:
    """Compile to machine code, or to PTX where the output's name says so; also from PTX.

    The machine code is not run: its assembler is spared to optimise it.
    """
    subprocess.run(
        ["nvcc", "-std=c++17", f"-I{SOURCES}", f"-arch={target}", "-diag-suppress=177,186",
         "-Xptxas=-O0", f"-{output.suffix[1:]}", "-o", output, source],
        check=True, timeout=300,
    )  # fmt: skip


@pytest.mark.parametrize(
    "kernel",
    [one if one == "ancf_choose" else pytest.param(one, marks=pytest.mark.slow) for one in KERNELS],
)
def test_nvcc_compiles_for_the_oldest_device(tmp_path, kernel):
    source = tmp_path / "kernels.cu"
    source.write_text(cuda_modules.wanted(kernel, DType.BFLOAT16).text())
    compile_with_nvcc(source, "sm_80", tmp_path / "kernels.cubin")


@pytest.mark.parametrize(
    "kernel",
    [
        one if one == "ancf_decode_bitmap" else pytest.param(one, marks=pytest.mark.slow)
        for one in KERNELS
    ],
)
def test_a_kernel_awaits_those_before_it_first(tmp_path, kernel):
    """It may begin while they run: until then it reads and writes nothing, nor does it end.

    And what nvcc makes of it for an H200 can be assembled.
    """
    source, ptx = tmp_path / "kernels.cu", tmp_path / "kernels.ptx"
    source.write_text(cuda_modules.wanted(kernel, DType.BFLOAT16).text())
    compile_with_nvcc(source, "compute_90", ptx)
    compile_with_nvcc(ptx, "sm_90", tmp_path / "kernels.cubin")
    bodies = dict(re.findall(r"\.entry (\w+)\((.*?)\n}", ptx.read_text(), re.DOTALL))
    assert kernel in bodies
    for name, body in bodies.items():
        before, awaits, _ = body.partition("griddepcontrol.wait")
        assert bool(awaits) == (name not in FIRST_KERNELS), name
        if awaits:
            assert not ACTION.search(before), name


def test_nvcc_compiles_the_operations_that_tests_compare(tmp_path):
    compile_with_nvcc(OPERATIONS, "sm_90", tmp_path / "operations.cubin")
