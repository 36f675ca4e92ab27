from __future__ import annotations

from dataclasses import asdict
from typing import Any

from stormd.monitoring.counters import Counters
from stormd.state import merged_status


def state(index: int, **changes: Any) -> dict[str, Any]:
    names = ("capacity", "committed", "used", "promised", "peak_used", "largest_free")
    found: dict[str, Any] = {
        "lanes": ["cpu", "cuda"],
        "pool": {f"{name}_bytes": 10 * index + n for n, name in enumerate(names)}
        | {"locked": True},
        "cache": None,
        "spill": None,
        "sessions": [],
        "entries": index,
        "raw_bytes": 100 * index,
        "gpus": [{"device": f"cuda:{index}"}],
        "log": {"dropped_lines": index},
    }
    return found | changes


def front() -> dict[str, Any]:
    sessions = [{"id": 1, "pid": 5, "entries": 0}, {"id": 2, "pid": 6, "entries": 0}]
    return state(0, sessions=sessions, lanes=["cpu"], gpus=[], cache={"items": 3}) | {
        "version": "v"
    }


def test_what_adds_up_is_added_and_the_front_s_pool_is_nobody_s() -> None:
    found = merged_status(front(), [state(2), state(1)], Counters(), [], 100)
    assert found["pool"]["capacity_bytes"] == 30
    assert found["pool"]["largest_free_bytes"] == 25
    assert (found["entries"], found["raw_bytes"]) == (3, 300)
    assert found["ratio"] == 300 / (found["pool"]["used_bytes"] + found["pool"]["promised_bytes"])
    lent = merged_status(front(), [state(2), state(1)], Counters(), [], 25)
    assert lent["pool"]["capacity_bytes"] == 25, "a pool that is lent is counted once"
    assert [gpu["device"] for gpu in found["gpus"]] == ["cuda:1", "cuda:2"]
    assert found["lanes"] == ["cpu", "cuda"]
    assert (found["cache"], found["version"], found["log"]) == (
        {"items": 3},
        "v",
        {"dropped_lines": 3},
    )


def test_sessions_are_the_front_s_with_what_their_worker_says() -> None:
    held = {"id": 2, "pid": 0, "entries": 4}
    gone = {"id": 9, "pid": 0, "entries": 4}
    found = merged_status(front(), [state(1, sessions=[held, gone])], Counters(), [], 100)
    assert found["sessions"] == [
        {"id": 1, "pid": 5, "entries": 0},
        {"id": 2, "pid": 6, "entries": 4},
    ]


def test_tiers_on_disk_add_up() -> None:
    def tier(n: int, ended: str) -> dict[str, Any]:
        way = {"bytes": n, "busy_seconds": 0.5, "bytes_per_second": 2.0 * n}
        names = ("capacity_bytes", "used_bytes", "away_bytes", "lost_entries")
        return {
            **dict.fromkeys(names, n), "path": "/x", "encrypted": True, "oldest_seconds": float(n),
            "ended": ended, "write": way, "read": way,
        }  # fmt: skip

    states = [state(1, spill=tier(1, "")), state(2, spill=tier(2, "broken"))]
    merged = merged_status(front(), states, Counters(), [], 100)
    pool, found = merged["pool"], merged["spill"]
    assert merged["ratio"] == 300 / (pool["used_bytes"] + pool["promised_bytes"] + 3)
    assert (found["capacity_bytes"], found["oldest_seconds"], found["ended"]) == (3, 2.0, "broken")
    assert found["write"] == {"bytes": 3, "busy_seconds": 1.0, "bytes_per_second": 6.0}
    assert (found["path"], found["encrypted"]) == ("/x", True)


def test_work_of_others_is_counted_and_their_sessions_are_not() -> None:
    worker = Counters()
    worker.stores["raw"].add(100, 50, 0.25, 0.002)
    worker.restores["ancf"].failures = 2
    worker.rejected["quota"] = 3
    worker.malformed, worker.sessions, worker.ended["died"] = 1, 5, 4
    ours = Counters.of(asdict(worker))
    assert asdict(ours) == asdict(worker)
    ours.add_work(worker)
    assert (ours.stores["raw"].operations, ours.stores["raw"].raw_bytes) == (2, 200)
    waits = ours.stores["raw"].waits
    assert (sum(waits.counts), waits.total_seconds) == (2, 0.004)
    assert (ours.restores["ancf"].failures, ours.rejected["quota"], ours.malformed) == (4, 6, 2)
    assert (ours.sessions, ours.ended["died"]) == (5, 4)
