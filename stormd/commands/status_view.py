"""The daemon's state as text for people; `stormd status` and `stormd top` share it.

It shows only what the state contains. Rates are computed from two states.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from stormd.sizes import format_size

__all__ = ["LinkRate", "Rates", "rates_between", "status_view"]

_BAR_WIDTH: Final = 40


@dataclass(frozen=True, slots=True)
class LinkRate:
    """One direction of a GPU's link."""

    bytes_per_second: float
    busy_share: float


@dataclass(frozen=True, slots=True)
class Rates:
    """The daemon's rates between two states.

    `store` and `restore` are bytes a second, before encoding. `links` has, by device and direction,
    the blobs' bytes a second while a GPU's link was busy, and the busy share of the time. `disk`
    has the same by direction, if there is a tier on disk.
    """

    store: float
    restore: float
    links: dict[str, dict[str, LinkRate]] = field(default_factory=dict)
    disk: dict[str, LinkRate] = field(default_factory=dict)


def rates_between(before: dict[str, Any], after: dict[str, Any]) -> Rates | None:
    """Return the rates between two states of one daemon, None if it was restarted in between."""
    seconds = after["uptime_seconds"] - before["uptime_seconds"]
    if seconds <= 0:
        return None
    moved = (
        after["throughput"][way]["raw_bytes"] - before["throughput"][way]["raw_bytes"]
        for way in ("store", "restore")
    )
    store, restore = (count / seconds for count in moved)
    return Rates(
        store, restore, _link_rates(before, after, seconds), _disk_rates(before, after, seconds)
    )


def status_view(address: str, state: dict[str, Any], rates: Rates | None = None) -> Group:
    """Return heading, pool and cache, sessions with their plans, and counters of a state."""
    heading = f"stormd {state['version']} at {address}, up {_duration(state['uptime_seconds'])}"
    troubles = _troubles(state["counters"])
    # An older daemon, from before plans existed, speaks the same protocol.
    planned = [session for session in state["sessions"] if session.get("plan") is not None]
    return Group(
        Text(heading, style="bold"),
        _pool(state),
        *([_disk(state["spill"], rates)] if state.get("spill") else []),
        _flows(state, rates),
        *([_gpus(state["gpus"], rates)] if state["gpus"] else []),
        *([_workers(state["workers"])] if state.get("workers") else []),
        _sessions(state["sessions"]) if state["sessions"] else "no sessions",
        *([_plans(planned)] if planned else []),
        *([Text(troubles, style="yellow")] if troubles else []),
    )


def _bars() -> Table:
    table = Table.grid(padding=(0, 1))
    for is_bar in (False, True, False, False, False, False):
        table.add_column(no_wrap=not is_bar)  # so that only the bar shrinks
    return table


def _pool(state: dict[str, Any]) -> Table:
    pool, table = state["pool"], _bars()
    table.add_row(
        "pool",
        *_filled(pool),
        f"peak {format_size(pool['peak_used_bytes'])}",
        f"{state['entries']} entries",
        f"ratio {state['ratio']:.2f}" if state["ratio"] else "",
    )
    cache = state["cache"]
    if cache is not None and cache["counters"]["puts"]:
        counters = cache["counters"]
        gets = counters["hits"] + counters["misses"]
        table.add_row(
            "cache",
            *_filled(cache),
            f"{cache['items']} tensors",
            f"hit rate {counters['hits'] / gets:.0%}" if gets else "",
            f"{counters['evictions']} evicted",
        )
    return table


def _disk(disk: dict[str, Any], rates: Rates | None) -> Table | Text:
    if disk["ended"]:
        lost = f"{disk['lost_entries']} entries are lost"
        return Text(f"disk {disk['path']} has ended: {disk['ended']}; {lost}", style="red")
    table = _bars()
    speeds = (
        rates.disk[way]
        if rates is not None and rates.disk
        else LinkRate(disk[way]["bytes_per_second"], 0.0)
        for way in ("write", "read")
    )
    written, read = (f"{speed.bytes_per_second / 1e9:.1f} GB/s" for speed in speeds)
    table.add_row(
        "disk",
        *_filled(disk),
        f"write {written}",
        f"read {read}",
        f"oldest {disk['oldest_seconds']:.0f} s",
    )
    return table


def _disk_rates(
    before: dict[str, Any], after: dict[str, Any], seconds: float
) -> dict[str, LinkRate]:
    older, newer = before.get("spill"), after.get("spill")
    if not older or not newer:
        return {}
    return {way: _link_rate(older[way], newer[way], seconds) for way in ("write", "read")}


def _filled(space: dict[str, Any]) -> tuple[ProgressBar, str]:
    used, capacity = space["used_bytes"], space["capacity_bytes"]
    bar = ProgressBar(total=capacity, completed=used, width=_BAR_WIDTH)
    return bar, f"{format_size(used)} of {format_size(capacity)}"


def _flows(state: dict[str, Any], rates: Rates | None) -> Table:
    table = Table("", "operations", "bytes", "stored as", "a second", box=None)
    for way in ("store", "restore"):
        flow = state["throughput"][way]
        rate = flow["bytes_per_second"] if rates is None else getattr(rates, way)
        table.add_row(
            way,
            f"{flow['operations']}",
            format_size(flow["raw_bytes"]),
            format_size(flow["blob_bytes"]),
            f"{format_size(rate)}/s" + (" of work" if rates is None else ""),
        )
    return table


def _gpus(gpus: list[dict[str, Any]], rates: Rates | None) -> Table:
    table = Table("gpu", "kernels", "link, store", "busy", "link, restore", "busy", box=None)
    for gpu in gpus:
        lately = _lately(gpu) if rates is None else rates.links.get(gpu["device"], _lately(gpu))
        percent = gpu["busy_percent"]
        cells = [
            text
            for one in lately.values()
            for text in (f"{one.bytes_per_second / 1e9:.1f} GB/s", f"{one.busy_share:.0%}")
        ]
        table.add_row(gpu["device"], "unknown" if percent is None else f"{percent}%", *cells)
    return table


def _lately(gpu: dict[str, Any]) -> dict[str, LinkRate]:
    """Return the rates of the last interval, as the daemon itself reports them."""
    return {
        way: LinkRate(link["bytes_per_second"], link["busy_share"])
        for way, link in gpu["link"].items()
    }


def _link_rates(
    before: dict[str, Any], after: dict[str, Any], seconds: float
) -> dict[str, dict[str, LinkRate]]:
    older = {gpu["device"]: gpu["link"] for gpu in before["gpus"]}
    return {
        gpu["device"]: {
            way: _link_rate(older[gpu["device"]][way], link, seconds)
            for way, link in gpu["link"].items()
        }
        for gpu in after["gpus"]
        if gpu["device"] in older
    }


def _link_rate(before: dict[str, Any], after: dict[str, Any], seconds: float) -> LinkRate:
    busy = after["busy_seconds"] - before["busy_seconds"]
    moved = after["bytes"] - before["bytes"]
    return LinkRate(moved / busy if busy else 0.0, min(1.0, busy / seconds))


def _sessions(sessions: list[dict[str, Any]]) -> Table:
    table = Table("session", "pid", "uid", "device", "entries", "used", box=None)
    for session in sorted(sessions, key=lambda session: -session["used_bytes"]):
        table.add_row(
            session["session"],
            f"{session['pid']}",
            f"{session['uid']}",
            session["device"],
            f"{session['entries']}",
            format_size(session["used_bytes"]),
        )
    return table


def _workers(workers: list[dict[str, Any]]) -> Table:
    table = Table("worker", "pid", "state", "sessions", "pool", "processor", "node", box=None)
    for worker in workers:
        pool = worker["pool"]
        node = worker["numa_node"]
        table.add_row(
            f"{worker['index']}, {' '.join(worker['devices'])}",
            f"{worker['pid']}",
            worker["phase"] + (f": {worker['trouble']}" if worker["trouble"] else ""),
            f"{worker['sessions']}",
            "" if pool is None else _filled(pool)[1],
            f"{worker['processor_seconds']:.1f} s",
            "any" if node < 0 else f"{node}",
        )
    return table


def _plans(sessions: list[dict[str, Any]]) -> Table:
    table = Table("plan of a step", "pid", "kept", "offloaded", "recomputed", "budget", box=None)
    for session in sessions:
        plan = session["plan"]
        sizes = (format_size(plan[f"{name}_bytes"]) for name in ("kept", "offloaded", "replayed"))
        table.add_row(session["session"], f"{session['pid']}", *sizes, plan["budget"])
    return table


def _troubles(counters: dict[str, Any]) -> str:
    counts = {
        **{f"rejected {reason}": count for reason, count in counters["rejected"].items()},
        **{name: counters[name] for name in ("deaths", "corrupt", "malformed", "refused")},
    }
    return ", ".join(f"{name} {count}" for name, count in counts.items() if count)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
