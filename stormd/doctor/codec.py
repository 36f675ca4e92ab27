"""Checks of what is installed: packages, the C library, and the codec on real data.

The codec is judged by what it gives back, not by what it says of itself.
"""

from __future__ import annotations

from importlib import metadata
from typing import Final

from stormd.doctor.finding import Finding
from stormd.machine import package_versions

__all__ = ["check_c_library", "check_codec", "check_packages"]

_LEAST_TORCH: Final = (2, 11)


def check_packages() -> Finding:
    """Check that what the daemon imports is there, and that torch is new enough."""
    versions = package_versions()
    missing = [name for name, version in versions.items() if version is None]
    shown = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    if missing:
        advice = f"pip install {' '.join(missing)}"
        return Finding("python packages", "fail", f"missing: {', '.join(missing)}", advice)
    if _release(metadata.version("torch")) < _LEAST_TORCH:
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
    """Check that every available backend gives a tensor back bit for bit."""
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


def _release(version: str) -> tuple[int, ...]:
    major, minor, *_ = version.split(".")
    return (int(major), int(minor))
