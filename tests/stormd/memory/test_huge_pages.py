"""A kernel without huge pages is one that the daemon runs on."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import pytest
from support.daemon_thread import DaemonThread
from support.raw_client import RawClient


def test_a_daemon_works_where_the_kernel_knows_no_huge_pages(
    make_daemon: Callable[..., DaemonThread],
    connect: Callable[..., RawClient],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 12345)  # an advice that no kernel knows
    client = connect(make_daemon()).open()
    entry = client.stored(b"data" * 1000, codec="ancf")
    assert client.restored(entry, 4000) == b"data" * 1000
