"""The tiles that launches.py chooses, compiled for a GPU that need not be here: hardly a register
spills to memory, and each published word is looked at once where it is asked for.
"""

from __future__ import annotations

import re
import subprocess
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from storm_kernels.scan import cuda

CAPABILITY = 90
TYPES = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
}
LONG, MANY, CHANNELS = (1, 1 << 24), (4096, 4096), (1, 65536, 512)
CASES = [
    ("fold", LONG, torch.float32),
    ("fold", CHANNELS, torch.float32),
    ("fold", CHANNELS, torch.bfloat16),
    ("compensated", LONG, torch.float32),
    ("linear", MANY, torch.float32),
    ("linear", CHANNELS, torch.float32),
    ("linear", CHANNELS, torch.complex64),
    ("linear", LONG, torch.complex64),
    ("gradient", MANY, torch.float32),
    ("gradient", CHANNELS, torch.complex64),
]


def _cuobjdump() -> Path | None:
    found = find_spec("triton")
    if found is None or found.origin is None:
        return None
    program = Path(found.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return program if program.exists() else None


CUOBJDUMP = _cuobjdump()
pytestmark = pytest.mark.skipif(
    CUOBJDUMP is None, reason="Triton is not installed, or has no cuobjdump"
)
NEWER_TRITON = CUOBJDUMP is not None and tuple(map(int, version("triton").split(".")[:2])) > (3, 6)
MAX_SPILLED = 72
"""Bytes a thread, of the longest tile of one row: with fewer elements it was slower."""


class Launched:
    """Stands for the kernels, and keeps what they would be launched with."""

    def __init__(self, kernels):
        self._kernels = kernels
        self.kernel, self.constants, self.arguments = None, {}, ()

    def __getattr__(self, name):
        self.kernel = getattr(self._kernels, name)
        return self

    def __getitem__(self, grid):
        return self._keep

    def _keep(self, *arguments, **constants):
        self.arguments, self.constants = arguments, constants


def launched(scan, shape, dtype, monkeypatch):
    """Return what a scan of `shape` would launch."""
    found = Launched(cuda.load_kernels())
    monkeypatch.setattr(cuda, "load_kernels", lambda: found)
    x = torch.empty(shape, dtype=dtype, device="meta")
    monkeypatch.setattr(cuda, "_known", {})
    if scan == "linear":
        cuda.linear(x, x, None, x, 1, reverse=False)
    elif scan == "gradient":
        cuda.linear_gradient(x, x, x, None, x, x, 1, reverse=False)
    else:
        cuda.fold(x, x, 1, op="add", reverse=False, exclusive=False,
                  compensated=scan == "compensated")  # fmt: skip
    return found


def compiled(found):
    """Return Triton's results for a launch, its sizes specialised as a call would have them."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    counts = found.kernel.do_not_specialize
    constants = dict(found.constants)
    limits = {"num_warps": constants.pop("num_warps")}
    signature, attributes, fixed = {}, {}, {}
    names = found.kernel.arg_names
    for place, name in enumerate(names):
        value = found.arguments[place] if place < len(found.arguments) else constants[name]
        if isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
            attributes[(place,)] = [["tt.divisibility", 16]]
        elif name in constants or (value == 1 and name not in counts):
            signature[name] = "constexpr"
            fixed[(place,)] = value
        else:
            signature[name] = "i32" if value < 1 << 31 else "i64"
            if value % 16 == 0 and name not in counts:
                attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=found.kernel, signature=signature, constexprs=fixed, attrs=attributes)
    target = GPUTarget("cuda", CAPABILITY, 32)
    return triton.compile(source, target=target, options=limits)


@pytest.mark.parametrize(("scan", "shape", "dtype"), CASES)
def test_each_word_is_looked_at_once_and_registers_hold_a_tile(
    scan, shape, dtype, monkeypatch, tmp_path
):
    found = launched(scan, shape, dtype, monkeypatch)
    made = compiled(found)
    looks = found.constants["LEVELS"] * found.constants["MAPS"] * 2
    assert len(re.findall(r"tt\.load.*isVolatile = true", made.asm["ttgir"])) == looks
    if NEWER_TRITON:  # the tiles were chosen with Triton 3.6; newer ones may spill
        return
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(made.asm["cubin"])
    report = subprocess.run(
        [CUOBJDUMP, "--dump-resource-usage", binary],
        capture_output=True, text=True, check=True, timeout=300,
    ).stdout  # fmt: skip
    (stack,) = re.findall(r"STACK:(\d+)", report)
    assert int(stack) <= MAX_SPILLED
