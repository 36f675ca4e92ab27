"""Every module and operator of PyTorch's databases as a layer that is called again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from storm_client.layers import parts_of
from storm_client.plan.layer_cut import CutCall, Graphs, LayerCalls
from storm_client.plan.layer_snapshots import Attributes, tensors_in
from storm_client.plan.layer_state import Call, CallState
from storm_client.plan.layer_trial import call_twice
from storm_client.stats import StatsRecorder
from support.comparing import Plain
from support.databases import EXCEPTIONS, Sample, module_samples, operator_samples, same
from torch.nn.parameter import UninitializedTensorMixin

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def databases() -> None:
    pytest.importorskip("expecttest", reason="PyTorch's own tests need it")


class Layer(torch.nn.Module):
    """A function, or a module, with a forward of its own."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class Again:
    """Calls one sample's function: tries it first, then such that it may be called again."""

    def __init__(self) -> None:
        self._calls: LayerCalls | None = None
        self.refusal = ""

    def __call__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        layer = Layer(function)
        if any(isinstance(one, UninitializedTensorMixin) for one in layer.parameters()):
            self.refusal = "nobody tries what is not there yet"
            return layer.forward(*args, **kwargs)
        if self._calls is None:
            return self._try(layer, args, kwargs)
        passed = Attributes(list(parts_of([layer])))
        state = CallState("layer", passed, layer, passed.own, (args, kwargs))
        call = Call(state, layer.forward, StatsRecorder())
        return self._calls.run(call, passed.own + passed.tensors, (args, kwargs))

    def _try(self, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            tensors_in((*args, *kwargs.values()))
        except TypeError as error:
            self.refusal = str(error)
            return layer.forward(*args, **kwargs)
        trial = call_twice(layer, layer.forward, args, kwargs)
        self.refusal = trial.difference
        self._calls = LayerCalls(Graphs())
        if trial.needs_no_graph:
            self._calls.need_no_graphs()
        return trial.made


def compare(
    samples: Iterable[Sample], device: str, monkeypatch: pytest.MonkeyPatch
) -> Counter[str]:
    """Run each three times as a layer: tried, with a graph, and without one if that may be."""
    cuts: list[CutCall] = []
    call_cut = CutCall.__call__

    def noted(self: CutCall, arguments: Any) -> Any:
        cuts.append(self)
        return call_cut(self, arguments)

    monkeypatch.setattr(CutCall, "__call__", noted)
    counts: Counter[str] = Counter()
    differing: list[str] = []
    for sample in samples:
        if sample.name.partition(" ")[0] in EXCEPTIONS[device]:
            continue
        try:
            expected = sample.run(Plain())
        except Exception:  # noqa: BLE001 - samples of what PyTorch refuses to differentiate
            counts["refused"] += 1
            continue
        if not same(sample.run(Plain()), expected):
            counts["not deterministic"] += 1
            continue
        call = Again()
        for number in range(1 if call.refusal else 3):
            try:
                found = sample.run(Plain(), call)
            except Exception as error:  # noqa: BLE001 - all that differ are reported together
                differing.append(f"{sample.name}, run {number}: {type(error).__name__}: {error}")
                break
            if not same(found, expected):
                differing.append(f"{sample.name}, run {number}: other bits")
                break
            if call.refusal:
                counts["left alone"] += 1
                break
        else:
            counts["without a graph" if cuts else "with a graph"] += 1
        cuts.clear()
    print(dict(counts))
    assert not differing, "\n".join(differing)
    return counts


def test_first_samples_of_modules(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = compare(module_samples(device), device, monkeypatch)
    assert counts["without a graph"] > 150, counts


def test_first_samples_of_operators(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = compare(operator_samples(device), device, monkeypatch)
    assert counts["without a graph"] > 400, counts
    assert counts["with a graph"] > 100, counts


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_all_samples(dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = compare(module_samples(device, dtype), device, monkeypatch)
    counts += compare(operator_samples(device, dtype), device, monkeypatch)
    assert counts["without a graph"] > counts["with a graph"], counts
