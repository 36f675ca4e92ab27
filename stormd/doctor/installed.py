"""Checks of what is installed: packages, the C library, the codec on real data, compiled code.

The codec is judged by the data that it decodes, not by what it reports. The client's own build
program runs as a file: it needs only the standard library, and a daemon's commands do not load the
client.
"""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from stormd.doctor.finding import Finding
from stormd.machine import package_versions

__all__ = ["check_c_library", "check_codec", "check_compiled", "check_packages"]

_MIN_TORCH: Final = (2, 11)
_COMPILED: Final = "compiled client"
_BUILD_SECONDS: Final = 30.0


def check_packages() -> Finding:
    """Check that the packages that the daemon imports are there, and that torch is new enough."""
    versions = package_versions()
    missing = [name for name, version in versions.items() if version is None]
    shown = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    if missing:
        advice = f"pip install {' '.join(missing)}"
        return Finding("python packages", "fail", f"missing: {', '.join(missing)}", advice)
    if _release(metadata.version("torch")) < _MIN_TORCH:
        return Finding("python packages", "fail", shown, "pip install 'torch>=2.11'")
    return Finding("python packages", "ok", shown)


def check_c_library() -> Finding:
    """Check that the C codec was built; without it NumPy does the work, many times slower."""
    from storm_kernels import backends

    info = backends()["cpu"]
    if info.available:
        return Finding("C library", "ok", info.detail)
    return Finding("C library", "warn", info.detail, "install gcc, then install stormd again")


def check_codec() -> Finding:
    """Check that every available CPU backend decodes a tensor bit for bit."""
    import torch
    from storm_kernels import ancf, backends

    sample = torch.randn(1 << 16, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    names = [name for name in ("cpu", "numpy") if backends()[name].available]
    for name in names:
        back = ancf.decode(ancf.encode(sample, backend=name), backend=name)
        if not torch.equal(back.view(torch.int16), sample.view(torch.int16)):
            advice = "do not run the daemon; report this with the processor's name"
            return Finding("codec", "fail", f"backend {name} changed the data", advice)
    return Finding("codec", "ok", f"lossless on {', '.join(names)}")


def check_compiled() -> Finding:
    """Check that the client's module is built, or can be; without it, slower Python is used."""
    spec = find_spec("storm_client")
    if spec is None or spec.origin is None:
        return Finding(_COMPILED, "skip", "the client is not installed")
    program = Path(spec.origin).parent / "native" / "build.py"
    done = subprocess.run(  # noqa: S603 - this Python and a file of the package
        [sys.executable, str(program), "--check"],
        capture_output=True,
        text=True,
        check=False,
        timeout=_BUILD_SECONDS,
    )
    if done.returncode == 0:
        return Finding(_COMPILED, "ok", done.stdout.strip())
    detail = f"Python follows steps, which costs the training thread more: {done.stderr.strip()}"
    advice = "install g++, then `python -m storm_client.native`"
    return Finding(_COMPILED, "warn", detail, advice)


def _release(version: str) -> tuple[int, ...]:
    major, minor, *_ = version.split(".")
    return (int(major), int(minor))
