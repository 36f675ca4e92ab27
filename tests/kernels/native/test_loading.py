"""Finding and loading the C library: what is missing is said, what is too old is refused."""

from __future__ import annotations

import re

import pytest
from storm_kernels import native
from storm_kernels.errors import BackendUnavailable
from storm_kernels.native import InstructionSet


@pytest.fixture
def fresh():
    """`load` without its memory, before and after."""
    native.load.cache_clear()
    yield
    native.load.cache_clear()


def test_a_library_that_is_missing_broken_or_of_another_version_is_named(
    fresh, monkeypatch, tmp_path
):
    assert native.available_sets()[0] is InstructionSet.PORTABLE
    native.load.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(native, "ABI_VERSION", native.ABI_VERSION + 1)
        with pytest.raises(BackendUnavailable, match=f"needs {native.ABI_VERSION}"):
            native.load()
    path = tmp_path / native.FILE_NAME
    monkeypatch.setattr(native, "_candidates", lambda: iter([path]))
    with pytest.raises(BackendUnavailable, match=re.escape(str(tmp_path))):
        native.load()
    path.write_text("not a library")
    with pytest.raises(BackendUnavailable, match=re.escape(str(path))):
        native.load()
