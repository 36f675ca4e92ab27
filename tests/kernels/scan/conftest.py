"""Fixtures of the scans' tests: every backend of this machine, and where its tensors lie."""

from __future__ import annotations

import pytest
import torch
from storm_kernels import backends

_GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(params=["numpy", "cpu", _GPU])
def backend(request: pytest.FixtureRequest) -> str:
    """The name of a backend that works here."""
    info = backends("scan")[request.param]
    if not info.available:
        pytest.skip(f"backend {info.name}: {info.detail}")
    return info.name


@pytest.fixture
def device(backend: str) -> str:
    """Where the backend's tensors lie."""
    return "cuda" if backend == "cuda" else "cpu"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
