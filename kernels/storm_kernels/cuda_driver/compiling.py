"""Compiles a CUDA source with NVRTC, with the given options and no others.

CuPy's compiler flushes denormal numbers to zero; PyTorch's kernels keep them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from storm_kernels.cuda_driver.calls import call
from storm_kernels.errors import BackendUnavailable

__all__ = ["compiled"]


def compiled(source: Path, options: Sequence[str], failure: str) -> bytes:
    """Return the machine code of `source`.

    Raises:
        BackendUnavailable: `source` cannot be compiled; the message is `failure` and the log.
        CudaDriverError: NVRTC fails otherwise.
    """
    from cuda.bindings import nvrtc

    name = source.name.encode()
    program = call(nvrtc.nvrtcCreateProgram, source.read_bytes(), name, 0, [], [])
    encoded = [option.encode() for option in options]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
    log = b" " * call(nvrtc.nvrtcGetProgramLogSize, program)
    call(nvrtc.nvrtcGetProgramLog, program, log)
    if status:
        raise BackendUnavailable(f"{failure}: {log.decode()}")
    code = b" " * int(call(nvrtc.nvrtcGetCUBINSize, program))
    call(nvrtc.nvrtcGetCUBIN, program, code)
    call(nvrtc.nvrtcDestroyProgram, program)
    return code
