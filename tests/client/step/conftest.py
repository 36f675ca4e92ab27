"""What tests of compiled steps share: what a machine costs, and how a step is compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import storm_client as storm
from storm_client.step.compiled import CompiledStep
from support.compile_fixtures import cpu_costs, full_link, kernels

__all__ = ["cpu_costs", "full_link", "kernels"]


@pytest.fixture
def wrap(client: storm.Client) -> Callable[..., CompiledStep]:
    return partial(storm.compile_step, client=client, min_bytes=1, codegen="eager")
