"""Every module and operator of PyTorch's databases: outputs and gradients are identical.

PyTorch's own tests are needed, which import `expecttest`. The default run takes one sample of each
entry; the slow tests take all of them in all dtypes, on a GPU with cuDNN and without.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
import storm_client as storm
import torch
from support.databases import EXCEPTIONS, Sample, Tally, module_samples, operator_samples

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex32,
        torch.complex64,
        torch.complex128,
    )
}

pytestmark = pytest.mark.filterwarnings("ignore")


def compare(samples: Iterable[Sample], device: str, client: storm.Client) -> Tally:
    """Compare all samples and report those that differ together."""
    tally = Tally(client.offload(min_bytes=1), EXCEPTIONS[device])
    for sample in samples:
        tally.compare(sample)
    print(dict(tally.counts))
    assert not tally.differing, "\n".join(tally.differing)
    return tally


@pytest.fixture(autouse=True)
def databases() -> None:
    pytest.importorskip("expecttest", reason="PyTorch's own tests need it")


def test_first_samples_of_modules(device: str, client: storm.Client) -> None:
    tally = compare(module_samples(device), device, client)
    least = {"cpu": 150, "cuda": 90}[device]  # there what is needed at once is held
    assert tally.counts["offloaded"] > least, tally.counts
    stats = tally.offload.stats()
    assert stats.offloaded_bytes + stats.kept_bytes > 250_000, stats


def test_first_samples_of_operators(device: str, client: storm.Client) -> None:
    tally = compare(operator_samples(device), device, client)
    least = {"cpu": 500, "cuda": 220}[device]
    assert tally.counts["offloaded"] > least, tally.counts
    stats = tally.offload.stats()
    assert stats.offloaded_bytes + stats.kept_bytes > 800_000, stats


@pytest.fixture(params=["cudnn", "no cudnn"])
def backend(request: pytest.FixtureRequest, device: str) -> Iterator[None]:
    """With cuDNN and without, where there is a choice."""
    if device == "cpu" and request.param == "no cudnn":
        pytest.skip("the CPU has no cuDNN")
    with torch.backends.cudnn.flags(enabled=request.param == "cudnn"):
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_samples_of_modules(dtype: str, device: str, client: storm.Client) -> None:
    tally = compare(module_samples(device, DTYPES[dtype]), device, client)
    least = {"cpu": 0.9, "cuda": 0.3}[device]
    assert tally.counts["offloaded"] >= least * tally.counts["identical"], tally.counts


@pytest.mark.slow
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_samples_of_operators(dtype: str, device: str, client: storm.Client) -> None:
    tally = compare(operator_samples(device, DTYPES[dtype]), device, client)
    least = {"cpu": 0.6, "cuda": 0.3}[device]
    assert tally.counts["offloaded"] >= least * tally.counts["identical"], tally.counts
