"""backends.py: what is there, why something is not, and which one a call gets."""

from __future__ import annotations

import subprocess
import sys

import pytest
from storm_kernels import BackendUnavailable, UsageError, backends
from storm_kernels import backends as listing
from storm_kernels.backends import SETTING, resolve


@pytest.fixture(autouse=True)
def _no_setting(monkeypatch):
    monkeypatch.delenv(SETTING, raising=False)


def test_every_backend_is_listed_with_a_reason():
    found = backends()
    assert list(found) == ["cuda", "cpu", "numpy"]
    assert all(info.name == name and info.detail for name, info in found.items())
    assert found["numpy"].available


def test_automatic_choice_is_the_first_that_works():
    found = listing()
    expected = "cpu" if found["cpu"].available else "numpy"
    assert resolve("auto", "cpu") == expected


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


@pytest.mark.parametrize("name", ["cuda", "cpu"])
def test_missing_backends_say_why(name):
    info = backends()[name]
    if info.available:
        assert resolve(name, name) == name
        return
    with pytest.raises(BackendUnavailable) as refused:
        resolve(name, name)
    assert info.detail in str(refused.value)


def test_importing_loads_nothing_heavy():
    code = (
        "import sys, storm_kernels, storm_kernels.ancf\n"
        "heavy = {'torch', 'cupy', 'cuda', 'triton'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
