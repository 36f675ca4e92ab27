"""What is saved on a GPU leaves it and comes back: other tests let much of it stay.

A wrong blob or decoder shows only in what is brought back.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import storm_client as storm
from storm_client.planner import DeviceWindow
from storm_client.planner import in_flight as window
from storm_client.planner.prefetch_order import StepPlan
from storm_client.transport.store import Outbound
from support.cuda_only import cuda_only
from support.random_programs import run
from support.training import assert_identical

pytestmark = cuda_only

PROGRAMS = 20


@pytest.fixture
def nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all that is saved on a GPU leave it at once, and come back from the daemon."""
    from storm_client.lanes.cuda import CudaLane

    monkeypatch.setattr(CudaLane, "keeps_stored", False)
    monkeypatch.setattr(window, "MIN_BYTES", 0)
    monkeypatch.setattr(DeviceWindow, "record_store", lambda window, nbytes: None)
    monkeypatch.setattr(StepPlan, "needed_at_once", lambda plan, nbytes: False)


@pytest.mark.parametrize("is_staged", [False, True])
@pytest.mark.parametrize("seed", range(PROGRAMS))
@pytest.mark.usefixtures("nothing_stays")
def test_a_random_program_of_which_nothing_stays(
    seed: int, is_staged: bool, client: storm.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_staged:
        monkeypatch.setattr(Outbound, "_store_in_place", lambda outbound, records: (records, []))
    offload = client.offload(min_bytes=1)
    expected = run(seed, "cuda", nullcontext)
    for _ in range(2):
        assert_identical(run(seed, "cuda", lambda: offload), expected)
