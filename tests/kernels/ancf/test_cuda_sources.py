"""The CUDA sources compile for real devices, on any machine.

NVRTC compiles them as CuPy has it do, where its library is at hand (`pip install
nvidia-cuda-nvrtc`, or torch's CUDA build, which brings it); nvcc does otherwise. Both need no GPU.
Where neither exists, test_cuda_on_cpu.py still runs the sources through the C++ compiler.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
import os
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
TARGETS = ["sm_80", pytest.param("sm_90", marks=pytest.mark.slow)]  # the oldest, and the H200
KINDS = [
    DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32, DType.UINT8, DType.FLOAT8_E5M2, DType.FLOAT64,
]  # fmt: skip

OPERATIONS = HOST / "device_operations.cu"  # a test's own, compiled like the kernels

# Of a RawModule here, and what CuPy 14 adds to them.
OPTIONS = (*cuda_modules._OPTIONS, "-ftz=true", "--device-as-default-execution-space")

pytestmark = pytest.mark.timeout(300)


def nvrtc_library() -> str | None:
    """The path of NVRTC: a Python package's, a toolkit's or the system's."""
    spec = importlib.util.find_spec("nvidia")
    packages = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    toolkits = [Path(os.environ[name]) for name in ("CUDA_PATH", "CUDA_HOME") if name in os.environ]
    for folder, pattern in [
        *((package, "*/lib/libnvrtc.so.*") for package in packages),
        *((toolkit, "lib64/libnvrtc.so.*") for toolkit in [*toolkits, Path("/usr/local/cuda")]),
    ]:
        if found := sorted(folder.glob(pattern)):
            return str(found[-1])
    return ctypes.util.find_library("nvrtc")


NVRTC = nvrtc_library()
nvcc_only = pytest.mark.skipif(
    NVRTC is not None or shutil.which("nvcc") is None,
    reason="no CUDA compiler (nvcc) here, or NVRTC is, which CuPy uses",
)


class Nvrtc:
    """One program at a time through NVRTC's C interface."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)

    def compile(self, code: str, options: tuple[str, ...]) -> tuple[int, str, int]:
        """Return NVRTC's result (0: compiled), its log, and the size of the machine code."""
        program = ctypes.c_void_p()
        self._call(
            "nvrtcCreateProgram", ctypes.byref(program), code.encode(), b"kernels.cu", 0, None, None
        )
        words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        result = self._library.nvrtcCompileProgram(program, len(options), words)
        size = ctypes.c_size_t()
        self._call("nvrtcGetProgramLogSize", program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        self._call("nvrtcGetProgramLog", program, log)
        size.value = 0
        if result == 0:
            self._call("nvrtcGetCUBINSize", program, ctypes.byref(size))
        self._call("nvrtcDestroyProgram", ctypes.byref(program))
        return result, log.value.decode(), size.value

    def _call(self, name: str, *arguments: object) -> None:
        result = getattr(self._library, name)(*arguments)
        assert result == 0, f"{name} failed with {result}"


def compile_with_nvcc(source: Path, target: str, output: Path) -> None:
    """Compile to machine code, or to PTX where the output's name says so; also from PTX.

    The machine code is not run: its assembler is spared to optimise it.
    """
    subprocess.run(
        ["nvcc", "-std=c++17", f"-I{SOURCES}", f"-arch={target}", "-diag-suppress=177,186",
         "-Xptxas=-O0", f"-{output.suffix[1:]}", "-o", output, source],
        check=True, timeout=300,
    )  # fmt: skip


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    if NVRTC is None:
        pytest.skip("no NVRTC here: pip install nvidia-cuda-nvrtc")
    return Nvrtc(NVRTC)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_nvrtc_compiles_as_cupy_has_it_do(nvrtc, kernel, target):
    text = cuda_modules.wanted(kernel, DType.BFLOAT16).text()
    result, log, size = nvrtc.compile(text, (*OPTIONS, f"-arch={target}"))
    assert result == 0, log
    assert size > 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", KINDS[1:], ids=lambda d: d.name)
@pytest.mark.parametrize("kernel", KERNELS)
def test_nvrtc_compiles_for_every_kind_of_element(nvrtc, kernel, dtype):
    text = cuda_modules.wanted(kernel, dtype).text()
    result, log, size = nvrtc.compile(text, (*OPTIONS, "-arch=sm_90"))
    assert result == 0, log
    assert size > 0


def test_nvrtc_compiles_the_operations_that_tests_compare(nvrtc):
    result, log, size = nvrtc.compile(OPERATIONS.read_text(), (*OPTIONS, "-arch=sm_90"))
    assert result == 0, log
    assert size > 0


def test_nvrtc_reports_what_is_wrong(nvrtc):
    result, log, _ = nvrtc.compile("__global__ void k() { missing(); }", ("-arch=sm_90",))
    assert result != 0
    assert "missing" in log


@nvcc_only
@pytest.mark.parametrize(
    "kernel",
    [one if one == "ancf_choose" else pytest.param(one, marks=pytest.mark.slow) for one in KERNELS],
)
def test_nvcc_compiles_for_the_oldest_device(tmp_path, kernel):
    source = tmp_path / "kernels.cu"
    source.write_text(cuda_modules.wanted(kernel, DType.BFLOAT16).text())
    compile_with_nvcc(source, "sm_80", tmp_path / "kernels.cubin")


@nvcc_only
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


@nvcc_only
def test_nvcc_compiles_the_operations_that_tests_compare(tmp_path):
    compile_with_nvcc(OPERATIONS, "sm_90", tmp_path / "operations.cubin")
