"""The figures that plans are made from: of which device, and with compression."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from storm_client.planner.machine import CPU, CUDA, expected_ratio, machine_of


def test_each_type_of_device_has_its_figures() -> None:
    assert machine_of(torch.device("cuda", 1)) is CUDA
    assert machine_of(torch.device("cpu")) is CPU


def test_compression_shortens_the_link_alone() -> None:
    faster = CUDA.compressing(2.0)
    assert faster.link == pytest.approx(CUDA.link / 2)
    assert replace(faster, link=CUDA.link) == CUDA


def test_what_is_not_encoded_is_not_compressed() -> None:
    assert expected_ratio(torch.bfloat16, "none") == 1.0
    assert expected_ratio(torch.bfloat16, "ancf") > 1.0
    assert expected_ratio(torch.int64, "ancf") == 1.0
