"""Statistics of an offload: what they count, and how they are printed."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import signal
import threading

import pytest
import storm_client as storm
import torch
from storm_client.monitoring.native_counts import NativeCounts
from storm_client.monitoring.stats import OffloadStats, StatsRecorder


def recorded() -> OffloadStats:
    recorder = StatsRecorder()
    recorder.skipped(13 << 20, "small")
    recorder.skipped(0, "small")
    recorder.skipped(1 << 20, "parameter")
    recorder.deduplicated(260 << 20)
    recorder.saved(3 << 30, 0.5)
    recorder.offloaded(2 << 30, torch.bfloat16)
    recorder.offloaded(512 << 20, torch.bool)
    recorder.stored(1 << 30, "window")
    recorder.stored(256 << 20, "raw")
    recorder.kept(512 << 20, "pool_full")
    recorder.restored(1.25)
    recorder.will_recompute(64 << 20)
    recorder.replayed(0.125)
    return recorder.snapshot()


def test_printed_it_is_a_table() -> None:
    assert str(recorded()).splitlines() == [
        "saved by autograd      3.3 GiB",
        "  kept by policy      14.0 MiB  small 2, parameter 1",
        "  duplicates         260.0 MiB",
        "  offloaded            2.5 GiB  bfloat16 2.0 GiB, bool 512.0 MiB",
        "  recomputed          64.0 MiB",
        "  not accepted       512.0 MiB  pool_full 1",
        "stored in the pool     1.2 GiB  ratio 2.00, window 1.0 GiB, raw 256.0 MiB",
        "storing                0.500 s",
        "waiting to restore     1.250 s",
        "recomputing            0.125 s",
    ]
    assert repr(recorded()).startswith("OffloadStats(saved_bytes=")
    assert "stored in the pool         0 B  ratio 1.00" in str(StatsRecorder().snapshot())


def test_it_does_not_change_and_can_be_copied_and_pickled() -> None:
    stats = recorded()
    for other in (copy.copy(stats), copy.deepcopy(stats), pickle.loads(pickle.dumps(stats))):
        assert other == stats
        assert repr(other) == repr(stats)
        with pytest.raises(TypeError):
            other.kept["pool_full"] = 2  # type: ignore[index]
        with pytest.raises(dataclasses.FrozenInstanceError):
            other.saved_bytes = 0  # type: ignore[misc]


def test_threads_count_together() -> None:
    recorder = StatsRecorder()

    def count() -> None:
        for _ in range(1000):
            recorder.saved(1, 0.0)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert recorder.snapshot().saved_bytes == 4000


def test_every_saved_byte_is_accounted_for(client: storm.Client) -> None:
    """With tensors that fill their storages, the parts add up to the whole."""
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
    offload = client.offload(net, min_bytes=8192)
    with offload:
        h = net(torch.ones(256, 64, requires_grad=True))
        loss = (h * h).sum() + (h[0] * h[0]).sum() + h.mean(0).exp().sum()
    stats = offload.stats()
    loss.backward()
    assert stats.saved_bytes == (
        stats.skipped_bytes + stats.deduplicated_bytes + stats.offloaded_bytes + stats.kept_bytes
    )
    assert set(stats.skipped) == {"parameter", "leaf", "small"}
    # tanh's output, h times itself, and its row, a view of what is known
    assert stats.deduplicated_bytes == 2 * h.nbytes + 2 * h[0].nbytes
    assert stats.offloaded_by_dtype == {"float32": stats.offloaded_bytes}
    assert sum(stats.stored_by_mode.values()) == stats.stored_bytes
    assert stats.ratio > 1
    assert stats.store_seconds > 0
    assert offload.stats().restore_wait_seconds > 0


class Signalling(str):
    """A signal arrives as it is looked up."""

    def __hash__(self) -> int:
        signal.raise_signal(signal.SIGUSR1)
        return super().__hash__()


@pytest.mark.timeout(60)
def test_a_signal_handler_may_read_the_statistics_at_any_moment() -> None:
    """It waited for ever for the thread that it had interrupted."""
    recorder, found = StatsRecorder(), []
    recorder.skipped(8, "small")
    before = signal.signal(signal.SIGUSR1, lambda *_: found.append(recorder.snapshot()))
    try:
        recorder.of_layer(Signalling("layer"))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert found
    assert all(one.skipped_bytes == 8 for one in found)


class InterruptedTallies:
    """Counts one small tensor in each row; the first new row is interrupted."""

    rows = 0

    def add_row(self) -> int:
        self.rows += 1
        if self.rows == 1:
            raise KeyboardInterrupt
        return self.rows - 1

    def drain(self) -> tuple[list[tuple[int, int, int]], float]:
        return [(row, 1, 8 * row) for row in range(1, self.rows)], 0.0


def test_an_interrupt_of_a_new_row_moves_no_counts_to_another() -> None:
    """The next block raised an IndexError, or a layer got another one's counts."""
    recorder = StatsRecorder()
    counts = recorder.native = NativeCounts(InterruptedTallies())
    with pytest.raises(KeyboardInterrupt):
        counts.row("first", "skipped", "small")
    for layer in ("first", "second"):
        counts.row(layer, "skipped", "small")
    found = {name: stats.skipped_bytes for name, stats in recorder.layers().items()}
    assert found == {"first": 8, "second": 16}
