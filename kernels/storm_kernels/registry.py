"""Maps each operation and backend to the module that implements it, and probes that module.

Each operation (`ancf`, `gemm`, `scan`, `ternary`) has up to three backends: "cuda", "cpu" and
"numpy". "numpy" is the reference and always available. A module that implements "cuda" or "cpu"
has `probe() -> (available, detail)`. No module is loaded before it is requested.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from .errors import UsageError

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["BACKENDS", "BackendInfo", "BackendName", "implementation", "operations", "probe"]

BackendName: TypeAlias = Literal["cuda", "cpu", "numpy"]

BACKENDS: Final[tuple[BackendName, ...]] = ("cuda", "cpu", "numpy")
"""All backends, the fastest first."""

_MODULES: Final[dict[str, dict[BackendName, str]]] = {
    "ancf": {
        "cuda": "storm_kernels.ancf.cuda",
        "cpu": "storm_kernels.ancf.cpu",
        "numpy": "storm_kernels.ancf.reference",
    },
    "gemm": {
        "cuda": "storm_kernels.gemm.hopper",
        "cpu": "storm_kernels.gemm.torch_product",
        "numpy": "storm_kernels.gemm.reference",
    },
    "scan": {
        "cuda": "storm_kernels.scan.cuda",
        "cpu": "storm_kernels.scan.cpu",
        "numpy": "storm_kernels.scan.reference",
    },
    "ternary": {
        "cuda": "storm_kernels.ternary.cuda",
        "cpu": "storm_kernels.ternary.cpu",
        "numpy": "storm_kernels.ternary.reference",
    },
}


@dataclass(frozen=True)
class BackendInfo:
    """Whether a backend works here; `detail` is its variant, or the reason why it is missing."""

    name: BackendName
    available: bool
    detail: str


def operations() -> tuple[str, ...]:
    """Return the names of all operations."""
    return tuple(_MODULES)


def implementation(operation: str, backend: str) -> ModuleType:
    """Load and return the module that implements `operation` on `backend`.

    Raises UsageError for unknown names, ImportError if a dependency of the module is missing.
    """
    return import_module(_module_name(operation, backend))


def probe(operation: str, backend: str) -> BackendInfo:
    """Return whether `backend` works for `operation` here; raises UsageError for unknown names."""
    module = _module_name(operation, backend)
    name = next(one for one in BACKENDS if one == backend)
    if name == "numpy":
        return BackendInfo(name, available=True, detail="reference")
    try:
        available, detail = import_module(module).probe()
    except ImportError as missing:
        return BackendInfo(name, available=False, detail=str(missing))
    return BackendInfo(name, available=available, detail=detail)


def _module_name(operation: str, backend: str) -> str:
    modules = _MODULES.get(operation)
    if modules is None:
        known = ", ".join(map(repr, _MODULES))
        raise UsageError(f"operation {operation!r} is unknown; choose one of {known}")
    for name, module in modules.items():
        if name == backend:
            return module
    raise UsageError(f"backend {backend!r} is unknown; choose 'auto', 'cuda', 'cpu' or 'numpy'")
