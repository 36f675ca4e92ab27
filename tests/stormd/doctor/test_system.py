"""Checks of the operating system, on real directories and limits."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from stormd.config import Config
from stormd.doctor import system


def _config(tmp_path: Path, **settings: object) -> Config:
    address = f"ipc://{tmp_path}/run/stormd.sock"
    return Config(address=address, cache_bytes=0, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(("share", "state"), [(2, "ok"), (0.9, "fail"), (1.2, "warn")])
def test_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, state: str) -> None:
    monkeypatch.setattr(system, "memory_limit", lambda: int(share * (1 << 30)))
    assert system.check_memory(_config(tmp_path, pool_bytes=1 << 30)).state == state


@pytest.mark.parametrize(("limit", "state"), [(1 << 20, "warn"), (1 << 31, "ok")])
def test_memlock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, state: str) -> None:
    monkeypatch.setattr(system, "_may_lock_all", lambda: False)
    monkeypatch.setattr(resource, "getrlimit", lambda _name: (limit, limit))
    assert system.check_memlock(_config(tmp_path, pool_bytes=1 << 30)).state == state


def test_the_privilege_lifts_the_memlock_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "_may_lock_all", lambda: True)
    monkeypatch.setattr(resource, "getrlimit", lambda _name: (0, 0))
    assert system.check_memlock(_config(tmp_path)).state == "ok"


@pytest.mark.parametrize(
    ("text", "state"), [("always madvise [never]\n", "warn"), ("always [madvise] never\n", "ok")]
)
def test_huge_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, state: str) -> None:
    (tmp_path / "enabled").write_text(text)
    monkeypatch.setattr(system, "_HUGE_PAGES", tmp_path / "enabled")
    assert system.check_huge_pages().state == state


def test_huge_pages_of_a_kernel_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "_HUGE_PAGES", tmp_path / "none")
    assert system.check_huge_pages().state == "skip"


def test_shared_memory_is_tried_for_real() -> None:
    assert system.check_shared_memory().state == "ok"


def test_shared_memory_that_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(_name: str, _flags: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", forbidden)
    finding = system.check_shared_memory()
    assert finding.state == "fail"
    assert "not permitted" in finding.detail


@pytest.mark.parametrize(("limit", "state"), [(100, "warn"), (4096, "ok")])
def test_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, state: str
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _name: (limit, limit))
    assert system.check_descriptors(_config(tmp_path, max_sessions=64)).state == state


def test_a_directory_that_can_be_made(tmp_path: Path) -> None:
    finding = system.check_runtime_directory(_config(tmp_path))
    assert finding.state == "ok"
    assert "will be made" in finding.detail


@pytest.mark.parametrize(
    ("mode", "state"),
    [(0o700, "ok"), (0o750, "ok"), (0o770, "fail"), (0o777, "fail"), (0o1777, "ok")],
)
def test_a_directory_that_exists(tmp_path: Path, mode: int, state: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(mode)
    finding = system.check_runtime_directory(_config(tmp_path))
    assert finding.state == state
    assert f"{mode:o}" in finding.detail


def test_a_directory_that_admitted_users_may_not_enter_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    finding = system.check_runtime_directory(
        _config(tmp_path, socket_mode=0o660, allowed_uids=(0, 4242))
    )
    assert finding.state == "warn"
    assert "users 4242 of allowed_uids may not enter" in finding.advice


def test_a_directory_of_someone_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    os.chown(tmp_path / "run", 12345, -1) if os.getuid() == 0 else pytest.skip("needs root")
    assert system.check_runtime_directory(_config(tmp_path)).state == "fail"
