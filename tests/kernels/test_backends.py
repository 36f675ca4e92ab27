"""backends.py: what is there, why something is not, and which one a call gets."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest
from storm_kernels import BackendUnavailable, UsageError, backends, registry
from storm_kernels.backends import SETTING, resolve
from storm_kernels.registry import implementation, operations, probe


@pytest.fixture(autouse=True)
def _no_setting(monkeypatch):
    monkeypatch.delenv(SETTING, raising=False)


def test_without_the_c_library_one_warning_says_what_to_do(tmp_path):
    code = (
        "import warnings, storm_kernels.native as native\n"
        "native.FILE_NAME = 'libmissing.so'\n"
        "from storm_kernels import ancf\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    warnings.simplefilter('always')\n"
        "    for _ in range(3): ancf.host_backend()\n"
        "print(*(one.message for one in seen), sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path
    )
    (line,) = done.stdout.splitlines()
    assert "NumPy" in line
    assert "reinstall the package where a C compiler is" in line


def test_setting_names_what_auto_means(monkeypatch):
    monkeypatch.setenv(SETTING, "numpy")
    assert resolve("auto", "cpu") == resolve("auto", "cuda") == "numpy"
    monkeypatch.setenv(SETTING, "abacus")
    with pytest.raises(UsageError, match="'abacus'"):
        resolve("auto", "cpu")


@pytest.mark.parametrize("operation", operations())
def test_every_operation_has_every_backend_or_says_why_not(operation):
    found = backends(operation)
    assert list(found) == ["cuda", "cpu", "numpy"]
    for name, info in found.items():
        assert info.name == name
        assert info.detail
        if info.available:
            assert resolve(name, name, operation) == name
            assert isinstance(implementation(operation, name), ModuleType)
        else:
            with pytest.raises(BackendUnavailable) as refused:
                resolve(name, name, operation)
            assert info.detail in str(refused.value)
    first = "cpu" if found["cpu"].available else "numpy"
    assert resolve("auto", "cpu", operation) == first


def test_unknown_names_are_told_with_the_known_ones(monkeypatch):
    with pytest.raises(UsageError, match=r"'abacus' is unknown; choose one of 'ancf', 'gemm'"):
        probe("abacus", "cpu")
    with pytest.raises(UsageError, match="backend 'abacus' is unknown"):
        probe("ancf", "abacus")
    broken = {"odd": {"cuda": "storm_kernels.nowhere", "cpu": "a", "numpy": "b"}}
    monkeypatch.setattr(registry, "_MODULES", broken)
    info = probe("odd", "cuda")
    assert not info.available
    assert "storm_kernels.nowhere" in info.detail
