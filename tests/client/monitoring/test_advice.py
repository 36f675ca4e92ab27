"""What is warned of after the first steps: a setting that would have more offloaded."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import storm_client as storm
import torch
from storm_client.monitoring.advice import advice
from storm_client.monitoring.stats import StatsRecorder
from support.daemon_process import DaemonProcess
from torch.utils.checkpoint import checkpoint

MIB = 1 << 20


def advised(
    count: Callable[[StatsRecorder], None], *parameters: torch.nn.Parameter, min_bytes: int = MIB
) -> str | None:
    """Return the advice after two steps, in each of which `count` was called."""
    recorder = StatsRecorder()
    for _ in range(2):
        count(recorder)
    return advice(recorder.kept_totals(), 2, min_bytes, parameters)


def parameters(count: int, nbytes: int) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.empty(nbytes // 4)) for _ in range(count)]


def saves(offloaded: int, kept: int, reason: str) -> Callable[[StatsRecorder], None]:
    def count(recorder: StatsRecorder) -> None:
        recorder.saved(offloaded + kept, 0.0)
        recorder.offloaded(offloaded, torch.float32)
        recorder.stored(offloaded // 2, "window")
        recorder.kept(kept, reason)

    return count


def skips(tensors: int, nbytes: int, reason: str = "small") -> Callable[[StatsRecorder], None]:
    def count(recorder: StatsRecorder) -> None:
        for _ in range(tensors):
            recorder.skipped(nbytes, reason)

    return count


# --- the decision ---------------------------------------------------------------------------


def test_a_full_pool() -> None:
    text = advised(saves(40 * MIB, 200 * MIB, "pool_full"))
    assert text is not None
    assert "of 480.0 MiB of activations in 2 steps, 400.0 MiB were kept on the device" in text
    assert "80.0 MiB offloaded; the daemon's pool was full: set pool_bytes larger by about" in text
    assert "about 100.0 MiB" in text  # at the ratio of what was stored


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("quota", "session_quota_bytes"),
        ("daemon_slow", "did not take it in time.*encode_threads"),
        ("no_staging", "cannot map its memory, and no staging area could be made"),
    ],
)
def test_what_the_daemon_did_not_take(reason: str, words: str) -> None:
    with pytest.raises(RuntimeWarning, match=words):
        raise RuntimeWarning(advised(saves(0, 200 * MIB, reason)))


def test_tensors_below_min_bytes() -> None:
    text = advised(skips(64, 128 << 10))
    assert text is not None
    assert "128 tensors, of 128.0 KiB on average, were below min_bytes, 1.0 MiB" in text
    assert text.endswith("set min_bytes=65536")


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(saves(200 * MIB, 0, "pool_full"), id="all left"),
        pytest.param(saves(110 * MIB, 100 * MIB, "pool_full"), id="most left"),
        pytest.param(saves(0, 200 * MIB, "needed_at_once"), id="needed at once"),
        pytest.param(saves(0, 200 * MIB, "daemon_lost"), id="told of already"),
        pytest.param(skips(64, 4 << 20, "subclass"), id="cannot leave"),
        pytest.param(skips(64, 4 << 20, "parameter"), id="parameters"),
        pytest.param(skips(10_000, 1 << 10), id="too small to be worth it"),
        pytest.param(skips(8, 128 << 10), id="little in all"),
    ],
)
def test_no_advice_where_no_setting_helps(count: Callable[[StatsRecorder], None]) -> None:
    assert advised(count) is None


def test_small_parameters_are_no_activations() -> None:
    assert advised(skips(64, 128 << 10)) is not None
    assert advised(skips(64, 128 << 10), *parameters(64, 128 << 10)) is None


def test_a_model_that_ran_unseen() -> None:
    model = parameters(16, MIB)
    text = advised(skips(1, MIB, "in_use"), *model)
    assert text is not None
    assert "the hooks saw 2.0 MiB of activations, and 0 of the model's 16 large parameters" in text
    assert "torch.utils.checkpoint" in text
    assert advised(skips(8, MIB, "parameter"), *model) is None
    assert advised(skips(1, MIB, "in_use"), *model[:2]) is None
    assert advised(skips(1, 1, "in_use"), *parameters(16, 1 << 10), min_bytes=1) is None
    for parameter in model:
        parameter.requires_grad_(False)
    assert advised(skips(1, MIB, "in_use"), *model) is None


# --- with a daemon --------------------------------------------------------------------------


def train(
    offload: storm.Offload, step: Callable[[], torch.Tensor], steps: int
) -> list[warnings.WarningMessage]:
    """Return what was warned of."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(steps):
            with offload:
                loss = step()
            offload.stats()
            loss.backward()
    return warned


def chain(nbytes: int, length: int) -> torch.Tensor:
    """Save `length` results of that size."""
    y = torch.ones(nbytes // 4, requires_grad=True)
    for _ in range(length):
        y = y.exp().neg()
    return y.sum()


def test_small_tensors_are_warned_of_once(client: storm.Client) -> None:
    offload = client.offload()
    (warned,) = train(offload, lambda: chain(256 << 10, 32), 8)
    assert warned.category is RuntimeWarning
    assert warned.filename == __file__
    assert "set min_bytes=131072" in str(warned.message)
    offload = client.offload(min_bytes=131072)
    assert train(offload, lambda: chain(256 << 10, 32), 8) == []


def test_a_full_pool_is_warned_of(make_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = make_daemon("--pool-bytes", "2MiB")
    with storm.connect(daemon.address, timeout=30) as client:
        offload = client.offload(codec="raw")
        (warned,) = train(offload, lambda: chain(MIB, 16), 4)
    assert "pool was full" in str(warned.message)


@pytest.mark.parametrize("steps_without", [0, 3])
def test_a_checkpointed_model_is_warned_of(client: storm.Client, steps_without: int) -> None:
    layers = [torch.nn.Linear(512, 512, bias=False) for _ in range(8)]
    net = torch.nn.Sequential(*layers)
    x = torch.ones(4, 512)
    offload = client.offload(net)
    for _ in range(steps_without):
        with torch.no_grad(), offload:
            net(x)
    (warned,) = train(offload, lambda: checkpoint(net, x, use_reentrant=False).sum(), 8)
    assert "0 of the model's 8 large parameters" in str(warned.message)
    assert train(client.offload(net), lambda: net(x).sum(), 8) == []


def test_a_warning_that_is_an_error_leaves_nothing_behind(client: storm.Client) -> None:
    offload = client.offload()
    train(offload, lambda: chain(256 << 10, 32), 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="min_bytes"), offload:
            raise AssertionError("entered")
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert train(offload, lambda: chain(256 << 10, 32), 2) == []
