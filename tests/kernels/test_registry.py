"""registry.py: every operation has its three backends, and says why one is missing."""

from __future__ import annotations

from types import ModuleType

import pytest
from storm_kernels import UsageError, backends, registry
from storm_kernels.backends import resolve
from storm_kernels.registry import BACKENDS, implementation, operations, probe


@pytest.mark.parametrize("operation", operations())
def test_every_operation_has_every_backend(operation: str) -> None:
    found = backends(operation)
    assert list(found) == list(BACKENDS)
    for name, info in found.items():
        assert info.name == name
        assert info.detail
        if info.available:
            assert isinstance(implementation(operation, name), ModuleType)


@pytest.mark.parametrize("operation", operations())
def test_automatic_choice_works_without_a_gpu(operation: str) -> None:
    assert backends(operation)[resolve("auto", "cpu", operation)].available


def test_unknown_names_are_told_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"'abacus' is unknown; choose one of 'ancf', 'gemm'"):
        probe("abacus", "cpu")
    with pytest.raises(UsageError, match="backend 'abacus' is unknown"):
        probe("ancf", "abacus")


def test_a_module_that_cannot_be_loaded_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = {"odd": {"cuda": "storm_kernels.nowhere", "cpu": "a", "numpy": "b"}}
    monkeypatch.setattr(registry, "_MODULES", broken)
    info = probe("odd", "cuda")
    assert not info.available
    assert "storm_kernels.nowhere" in info.detail
