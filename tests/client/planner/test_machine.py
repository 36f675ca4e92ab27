"""The figures that plans are made from: of which device, and with compression."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from storm_client.planner.machine import (
    CPU,
    CUDA,
    LinkFigures,
    expected_ratio,
)

from stormd.protocol import Pong


def test_compression_shortens_the_link_alone() -> None:
    faster = CUDA.compressing(2.0)
    assert faster.link == pytest.approx(CUDA.link / 2)
    assert replace(faster, link=CUDA.link) == CUDA


def test_what_is_not_encoded_is_not_compressed() -> None:
    assert expected_ratio(torch.bfloat16, "none") == 1.0
    assert expected_ratio(torch.bfloat16, "ancf") > 1.0
    assert expected_ratio(torch.int64, "ancf") == 1.0


def test_a_link_is_as_fast_as_it_was_of_late() -> None:
    machine = CUDA.with_link(LinkFigures.of(Pong(link=25 * 10**9, limit=0, disk=0)))
    assert machine.link == pytest.approx(1 / 25e9)
    assert machine.measured == {"link"}
    assert replace(machine, link=CUDA.link, measured=frozenset()) == CUDA


def test_a_limit_or_a_disk_that_is_slower_is_waited_for_on_hosts_too() -> None:
    for speeds in (Pong(link=0, limit=10**7, disk=0), Pong(link=0, limit=0, disk=10**7)):
        figures = LinkFigures.of(speeds)
        assert CUDA.with_link(figures).link == CPU.with_link(figures).link == pytest.approx(1e-7)
    fast = LinkFigures.of(Pong(link=3 * 10**8, limit=10**12, disk=10**12))
    assert CUDA.with_link(fast).link == pytest.approx(1 / 3e8)
