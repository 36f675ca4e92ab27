"""Fixtures of the kernels' tests: products without a GPU."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.gemm_on_cpu import Emulated, install


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where libraries are, each compiled by the first test that needs it."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ here")
    return tmp_path_factory.mktemp("gemm")


@pytest.fixture
def emulated(built: Path, monkeypatch: pytest.MonkeyPatch) -> Emulated:
    """Products of tensors on a CPU go through the kernels' code."""
    return install(monkeypatch, built)
