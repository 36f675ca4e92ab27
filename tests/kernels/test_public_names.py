"""The names that callers outside this repository may use."""

from __future__ import annotations

import inspect
import subprocess
import sys

import storm_kernels
from storm_kernels import ancf, gemm, nn, scan

NAMES = {
    storm_kernels: {"BackendInfo", "backends", "CorruptBlob", "UsageError"},
    ancf: {"encode", "decode", "Blob", "max_encoded_bytes", "read_header", "host_backend"},
    gemm: {"Encoded", "backends", "gated_mlp", "grad_weight", "is_available", "linear"},
    scan: {"OPERATIONS", "associative_scan", "cumsum", "fused_associative_scan", "linear_scan"},
}
ARGUMENTS = {
    ancf.encode: ["tensor", "mode", "speed", "tolerance", "backend"],
    ancf.decode: ["blob", "out", "device", "backend"],
    scan.cumsum: ["x", "dim", "reverse", "exclusive", "dtype"],
    scan.linear_scan: ["a", "b", "initial", "dim", "reverse"],
    scan.associative_scan: ["op", "x", "dim", "reverse"],
    scan.fused_associative_scan: ["x", "dim", "reverse"],
    gemm.linear: ["x", "w", "bias", "encode"],
    gemm.gated_mlp: ["x", "w_gate", "w_up", "activation"],
    gemm.grad_weight: ["grad", "encoded"],
    nn.GatedMLP: ["width", "hidden", "activation", "device", "dtype"],
}


def test_names_are_there_and_documented() -> None:
    for module, names in NAMES.items():
        assert names <= set(module.__all__)
        for name in set(module.__all__) - {"OPERATIONS"}:
            assert getattr(module, name).__doc__, name
    for name in ("nbytes", "raw_nbytes", "ratio", "mode", "dtype", "shape"):
        assert isinstance(getattr(ancf.Blob, name), property)


def test_arguments() -> None:
    for function, names in ARGUMENTS.items():
        assert list(inspect.signature(function).parameters)[: len(names)] == names
    layer = inspect.signature(nn.AdaptiveRankSemiseparable).parameters
    assert {name: one.default for name, one in layer.items() if name != "d_model"} == {
        "max_rank": 32,
        "conv_size": 4,
        "decay": False,
        "use_fused_scan": True,
    }


def test_importing_loads_nothing_heavy() -> None:
    code = (
        "import sys, storm_kernels, storm_kernels.ancf, storm_kernels.gemm\n"
        "heavy = {'torch', 'cupy', 'cuda', 'triton'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
