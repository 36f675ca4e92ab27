"""What people see of a state."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from stormd.commands.status_view import LinkRate, Rates, rates_between, status_view


def _state(uptime: float = 3725.0, stored: int = 3 << 30) -> dict[str, Any]:
    flow = {
        "operations": 7,
        "raw_bytes": stored,
        "blob_bytes": stored // 2,
        "seconds": 2.0,
        "failures": 0,
        "bytes_per_second": stored / 2,
    }
    return {
        "version": "1.2.3",
        "uptime_seconds": uptime,
        "pool": {
            "capacity_bytes": 4 << 30,
            "used_bytes": 1 << 30,
            "peak_used_bytes": 2 << 30,
        },
        "cache": {
            "capacity_bytes": 3 << 20,
            "used_bytes": 1 << 20,
            "items": 4,
            "counters": {"puts": 9, "hits": 5, "misses": 2, "evictions": 1},
        },
        "entries": 5,
        "ratio": 1.5,
        "throughput": {"store": flow, "restore": dict(flow)},
        "gpus": [],
        "sessions": [
            {
                "id": 255,
                "session": "00000000000000ff",
                "pid": 10,
                "uid": 0,
                "device": "cpu",
                "entries": 1,
                "used_bytes": 1 << 20,
                "plan": None,
            },
            {
                "id": 256,
                "session": "0000000000000100",
                "pid": 11,
                "uid": 7,
                "device": "cuda",
                "entries": 4,
                "used_bytes": 1 << 29,
                "plan": {
                    "kept_bytes": 3 << 29,
                    "offloaded_bytes": 5 << 30,
                    "replayed_bytes": 7 << 20,
                    "budget": "0.5",
                },
            },
        ],
        "counters": {
            "rejected": {"pool_full": 3, "quota": 0},
            "deaths": 2,
            "corrupt": 0,
            "malformed": 0,
            "refused": 0,
        },
    }


def _shown(state: dict[str, Any], rates: Rates | None = None, width: int = 120) -> str:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as captured:
        console.print(status_view("ipc:///x", state, rates))
    return captured.get()


def _gpu(nbytes: int, busy_seconds: float, percent: int | None = 37) -> dict[str, Any]:
    link = {
        "bytes": nbytes,
        "busy_seconds": busy_seconds,
        "bytes_per_second": 50e9,
        "busy_share": 0.25,
    }
    return {
        "device": "cuda:0",
        "busy_percent": percent,
        "link": {"store": link, "restore": {**link, "bytes_per_second": 0.0, "busy_share": 0.0}},
    }


def _disk(written: int = 10**9, ended: str = "") -> dict[str, Any]:
    way = {"bytes": written, "busy_seconds": written / 2e9, "bytes_per_second": 2e9}
    return {
        "path": "/var/lib/stormd",
        "encrypted": True,
        "capacity_bytes": 8 << 30,
        "used_bytes": 3 << 30,
        "away_bytes": 2 << 30,
        "oldest_seconds": 12.4,
        "write": way,
        "read": {**way, "bytes_per_second": 0.0},
        "lost_entries": 7 if ended else 0,
        "ended": ended,
    }


def test_shows_the_tier_on_disk_and_its_end() -> None:
    shown = _shown({**_state(), "spill": _disk()})
    for part in ("3.0 GiB of 8.0 GiB", "write 2.0 GB/s", "read 0.0 GB/s", "oldest 12 s"):
        assert part in shown
    assert "write" not in _shown({**_state(), "spill": None})
    shown = " ".join(_shown({**_state(), "spill": _disk(ended="a write failed: EIO")}).split())
    assert "/var/lib/stormd has ended: a write failed: EIO; 7 entries are lost" in shown


def test_shows_what_the_daemon_says_of_its_gpus() -> None:
    shown = _shown({**_state(), "gpus": [_gpu(10**9, 1.0)]})
    row = next(line for line in shown.splitlines() if "cuda:0" in line).split()
    assert row == ["cuda:0", "37%", "50.0", "GB/s", "25%", "0.0", "GB/s", "0%"]
    assert "unknown" in _shown({**_state(), "gpus": [_gpu(1, 1.0, None)]})
    assert "kernels" not in _shown(_state())


def test_between_two_states_rates_are_those_of_the_time_between() -> None:
    before = {**_state(100.0), "gpus": [_gpu(10**9, 1.0)], "spill": _disk(10**9)}
    after = {**_state(102.0), "gpus": [_gpu(21 * 10**9, 1.5)], "spill": _disk(4 * 10**9)}
    rates = rates_between(before, after)
    assert rates.links["cuda:0"]["store"] == LinkRate(40e9, 0.25)
    assert rates.disk["write"] == LinkRate(2e9, 0.75)
    shown = _shown(after, rates)
    row = next(line for line in shown.splitlines() if "cuda:0" in line)
    assert row.split()[2:5] == ["40.0", "GB/s", "25%"]
    assert "write 2.0 GB/s" in shown
    appeared = rates_between(_state(100.0) | {"spill": None}, after)
    assert appeared.links == {}
    assert "write 2.0 GB/s" in _shown(after, appeared)
    assert rates_between(after, _state(1.0)) is None, "another daemon"


def test_shows_a_cache_that_is_used() -> None:
    shown = _shown(_state())
    assert "1.0 MiB of 3.0 MiB" in shown
    assert "4 tensors" in shown
    assert "hit rate 71%" in shown
    for cache in (None, {"counters": {"puts": 0}}):
        assert "cache" not in _shown({**_state(), "cache": cache})


def test_a_terminal_of_80_columns_shows_a_large_node_without_a_break() -> None:
    state = {**_state(), "entries": 1234567}
    state["pool"] = dict.fromkeys(state["pool"], 1023 << 30)
    shown = _shown(state, width=80).splitlines()
    assert max(map(len, shown)) <= 80
    (pool,) = (line for line in shown if line.startswith("pool"))
    for part in ("1023.0 GiB of 1023.0 GiB", "peak 1023.0 GiB", "1234567 entries", "ratio 1.50"):
        assert part in pool


def test_shows_the_plan_of_each_trainer_that_has_one() -> None:
    lines = _shown(_state()).splitlines()
    at = next(number for number, line in enumerate(lines) if "plan of a step" in line)
    assert lines[at].split()[4:] == ["pid", "kept", "offloaded", "recomputed", "budget"]
    plan = ["11", "1.5", "GiB", "5.0", "GiB", "7.0", "MiB", "0.5"]
    assert lines[at + 1].split() == ["0000000000000100", *plan]
    assert "00000000000000ff" not in lines[at + 2]


def test_shows_the_workers_where_there_are_some() -> None:
    worker = {
        "index": 1,
        "pid": 77,
        "devices": ["cuda:1", "cuda:3"],
        "phase": "ended",
        "trouble": "signal SIGKILL",
        "sessions": 0,
        "numa_node": 1,
        "processor_seconds": 12.25,
        "pool": {"used_bytes": 1 << 20, "capacity_bytes": 1 << 30},
    }
    other = worker | {"index": 2, "phase": "serving", "trouble": "", "numa_node": -1, "pool": None}
    lines = _shown(_state() | {"workers": [worker, other]}).splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith(" worker"))
    assert lines[at + 1].split()[:6] == ["1,", "cuda:1", "cuda:3", "77", "ended:", "signal"]
    assert lines[at + 1].split()[-4:] == ["GiB", "12.2", "s", "1"]
    assert lines[at + 2].split()[-4:] == ["0", "12.2", "s", "any"]
    assert "processor" not in _shown(_state() | {"workers": []})
