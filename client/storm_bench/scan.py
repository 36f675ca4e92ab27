"""`stormd bench scan`: the associative scans beside PyTorch's, others' and a plain copy.

All ways to compute a case run in one process on the same tensors. Their results are compared before
a time counts. A way that cannot run here is in the table with the reason.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from storm_bench.contenders import Contender, cells, seconds_of, skipped
from storm_bench.devices import device_here
from stormd.commands.arguments import positive_int
from stormd.errors import ChildFailed
from stormd.machine import package_versions
from stormd.output import write_line

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CASES", "Case", "add_scan_arguments", "measure_scan", "print_scan"]

_SEED: Final = 20
_FLUSHED_BYTES: Final = 1 << 30
"""Bytes written between two timed calls on a GPU, so that each call finds cold caches."""

_ACCURACY_LENGTH: Final = 1 << 20
_NO_SCAN: Final = "no scan at all, result wrong"
"""The row that shows a layer's time without that of the scan."""

_PACKAGES: Final = ("triton", "accelerated-scan", "fla-core")


@dataclass(frozen=True, slots=True)
class Case:
    """A shape and what to run along its dimension 1: "cumsum", "linear" with gradient, "layer"."""

    name: str
    kind: str
    shape: tuple[int, ...]


CASES: Final = {
    "cuda": (
        Case("small", "cumsum", (4, 512, 512)),
        Case("medium", "cumsum", (4, 2048, 512)),
        Case("batch", "cumsum", (4, 8192, 512)),
        Case("one", "cumsum", (1, 65536, 512)),
        Case("large", "cumsum", (8, 4096, 2048)),
        Case("rows", "cumsum", (64, 8192)),
        Case("many-rows", "cumsum", (4096, 4096)),
        Case("one-row", "cumsum", (1, 1 << 24)),
        Case("recurrence", "linear", (4, 8192, 512)),
        Case("recurrence-rows", "linear", (8 * 1536, 65536)),
        Case("layer", "layer", (4, 8192, 1024)),
    ),
    "cpu": (
        Case("small", "cumsum", (4, 512, 512)),
        Case("batch", "cumsum", (4, 8192, 512)),
        Case("many-rows", "cumsum", (4096, 4096)),
        Case("recurrence", "linear", (4, 8192, 512)),
        Case("layer", "layer", (1, 2048, 256)),
    ),
}
"""Cases by device. Of two dimensions, the first is batch and channels, the second the length."""


def add_scan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say what is to be measured, and how."""
    names = sorted({case.name for cases in CASES.values() for case in cases})
    parser.add_argument(
        "--cases", nargs="+", choices=names, help="what to measure (default: all of the device's)"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where")
    parser.add_argument("--rounds", type=positive_int, default=20, help="the median counts")


def measure_scan(args: argparse.Namespace) -> dict[str, Any]:
    """Measure every case and return the figures.

    Raises:
        ChildFailed: a scan's result is wrong.
    """
    import torch

    device = device_here(args.device)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a CPU's scans are compared on one core
    try:
        return {
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu, one thread",
            "backends": _backends(),
            "peers": package_versions(_PACKAGES),
            "accuracy": _accuracy(device),
            "cases": dict(_measured(device, args.cases, args.rounds)),
        }
    finally:
        torch.set_num_threads(threads)


def _measured(
    device: str, wanted: list[str] | None, rounds: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the figures of each wanted case, and report on standard error that it is done."""
    for case in CASES[device]:
        if wanted is None or case.name in wanted:
            yield case.name, _Bench(case, device, rounds).figures()
            sys.stderr.write(f"{case.name} measured\n")


def _backends() -> dict[str, str]:
    from storm_kernels import backends

    return {name: info.detail for name, info in backends("scan").items()}


class _Bench:
    """Measures one case; every figure is the median of `rounds`, in seconds."""

    def __init__(self, case: Case, device: str, rounds: int) -> None:
        self._case, self._device, self._rounds = case, device, rounds

    def figures(self) -> dict[str, Any]:
        """Return the times of all ways, also as multiples of a copy that moves the same bytes."""
        gc.collect()
        kind = {"cumsum": self._cumsum, "linear": self._linear, "layer": self._layer}
        return {"shape": list(self._case.shape), **kind[self._case.kind]()}

    def _cumsum(self) -> dict[str, Any]:
        import torch
        from storm_kernels import scan

        x = self._random()
        expected = x.double().cumsum(1)
        return self._table(
            self._seconds(x.clone),
            {
                "storm": lambda: scan.cumsum(x, 1),
                "torch.cumsum": lambda: torch.cumsum(x, 1),
                "compiled associative_scan": _compiled(_torch_add_scan, x),
            },
            expected,
        )

    def _linear(self) -> dict[str, Any]:
        from storm_kernels import scan

        a, b = self._random().sigmoid(), self._random()
        stream = self._seconds(b.clone) / 2  # one tensor read or written
        expected = scan.linear_scan(a[:1], b[:1], backend="numpy")[0]
        forward = self._table(
            3 * stream,
            {
                "storm": lambda: scan.linear_scan(a, b)[0],
                "compiled associative_scan": _compiled(_torch_linear_scan, a, b),
                "accelerated-scan": _accelerated(a, b),
                "fla hgrn": _hgrn(a, b),
            },
            expected,
        )
        del expected
        ways = {"storm": lambda a, b: scan.linear_scan(a, b)[0]}
        backward: dict[str, Any] = {"copy_seconds": 5 * stream}
        for name, way in (ways | _differentiable_peers(a)).items():
            seconds = self._backward_seconds(way, a, b)
            backward[name] = {"seconds": seconds, "of_copy": seconds / (5 * stream)}
        return {"forward": forward, "backward": backward}

    def _backward_seconds(self, way: Callable[..., Tensor], a: Tensor, b: Tensor) -> float:
        """Return the seconds of the gradients of both inputs, without the forward pass."""
        import torch

        sources = [one.detach().requires_grad_() for one in (a, b)]
        result = way(*sources)
        grad = torch.ones_like(result)
        work = partial(torch.autograd.grad, result, sources, grad, retain_graph=True)
        return self._seconds(work)

    def _layer(self) -> dict[str, Any]:
        """Return time and peak memory of a training step of AR-SSM with either scan, and with none.

        Without a scan the results are wrong, but its time is a lower bound: no scan, however fast,
        makes a step shorter.
        """
        import torch
        from storm_kernels.nn import AdaptiveRankSemiseparable

        class WithoutScan(AdaptiveRankSemiseparable):
            def _scan(self, mixing: Any, *, reverse: bool) -> Tensor:  # noqa: ARG002 (the layer's)
                written: Tensor = mixing.gate * mixing.write
                return written

        layers: dict[str, Callable[[int], Any]] = {
            "storm": AdaptiveRankSemiseparable,
            "torch.cumsum": partial(AdaptiveRankSemiseparable, use_fused_scan=False),
            _NO_SCAN: WithoutScan,
        }
        x = self._random()
        found: dict[str, Any] = {}
        for name, make in layers.items():
            torch.manual_seed(_SEED)
            layer = make(x.shape[-1]).to(self._device)
            optimizer = torch.optim.SGD(layer.parameters(), lr=1e-6)
            step = partial(_training_step, layer, optimizer, x)
            step()
            if self._device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            seconds = self._seconds(step)
            peak = torch.cuda.max_memory_allocated() if self._device == "cuda" else None
            found[name] = {"seconds": seconds, "peak_bytes": peak}
        return found

    def _table(
        self,
        copy: float,
        ways: dict[str, Contender],
        expected: Tensor,
    ) -> dict[str, Any]:
        rows: dict[str, Any] = {"copy_seconds": copy}
        for name, way in ways.items():
            if isinstance(way, str):
                rows[name] = {"skipped": way}
                continue
            try:
                _check(name, way(), expected)
                seconds = self._seconds(way)
            except ChildFailed:
                raise
            except Exception as error:  # noqa: BLE001 (others' code: any of its failures is a reason)
                rows[name] = skipped(error)
                continue
            rows[name] = {"seconds": seconds, "of_copy": seconds / copy}
        return rows

    def _random(self) -> Tensor:
        import torch

        generator = torch.Generator(self._device).manual_seed(_SEED)
        return torch.randn(self._case.shape, generator=generator, device=self._device)

    def _seconds(self, work: Callable[[], object]) -> float:
        for _ in range(3):
            work()
        return statistics.median(self._rounds_of(work))

    def _rounds_of(self, work: Callable[[], object]) -> Iterator[float]:
        import torch

        flushed = None
        if self._device == "cuda":
            flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.uint8, device="cuda")
        for _ in range(self._rounds):
            if flushed is not None:
                flushed.zero_()
            yield seconds_of(work, self._device)


def _training_step(layer: Any, optimizer: Any, x: Tensor) -> None:
    y, _ = layer(x)
    y.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _check(name: str, result: Tensor, expected: Tensor) -> None:
    """Compare the first sequences of a float32 result with the expected ones, by their norms."""
    part = expected.double()
    error = (result[: len(part)].double() - part).norm() / part.norm()
    if not error < 1e-4:
        raise ChildFailed(f"{name} is wrong by {error:.1e} of its norm: report this as a bug")


def _accuracy(device: str) -> dict[str, float]:
    """Return the largest errors of float32 sums of 2**20 values of 100 * N(0, 1), also in ulps."""
    import numpy as np
    import torch
    from storm_kernels import scan

    generator = torch.Generator().manual_seed(_SEED)
    x = 100 * torch.randn(_ACCURACY_LENGTH, generator=generator)
    exact = np.cumsum(x.numpy().astype(np.longdouble))
    ulp = np.spacing(np.abs(exact).astype(np.float32)).astype(np.longdouble)
    moved = x.to(device)
    results = {
        "torch.cumsum": torch.cumsum(moved, 0),
        "storm": scan.cumsum(moved, 0),
        "storm, compensated": scan.cumsum(moved, 0, compensated=True),
    }
    found: dict[str, float] = {}
    for name, result in results.items():
        error = np.abs(result.cpu().numpy().astype(np.longdouble) - exact)
        found[name] = float(error.max())
        found[f"{name}, ulps"] = float((error / ulp).max())
    return found


# --- others' scans --------------------------------------------------------------------------


def _torch_add_scan(x: Tensor) -> Tensor:
    from torch._higher_order_ops.associative_scan import associative_scan

    result: Tensor = associative_scan(lambda left, right: left + right, x, 1)
    return result


def _torch_linear_scan(a: Tensor, b: Tensor) -> Tensor:
    from torch._higher_order_ops.associative_scan import associative_scan

    def combine(left: Any, right: Any) -> Any:
        return left[0] * right[0], right[0] * left[1] + right[1]

    result: Tensor = associative_scan(combine, (a, b), 1)[1]
    return result


def _compiled(way: Callable[..., Tensor], *tensors: Tensor) -> Callable[[], Tensor] | str:
    import torch

    if tensors[0].device.type == "cpu":
        return "torch compiles associative_scan for CUDA alone"
    if tensors[0].numel() > 1 << 27:
        return "left out: its whole-sequence tiles take minutes to compile"
    return partial(torch.compile(way), *tensors)


def _accelerated(a: Tensor, b: Tensor) -> Callable[[], Tensor] | str:
    peers = _differentiable_peers(a)
    if "accelerated-scan" not in peers:
        return "needs accelerated-scan, a GPU, and channels before length"
    return partial(peers["accelerated-scan"], a, b)


def _differentiable_peers(a: Tensor) -> dict[str, Callable[..., Tensor]]:
    """Return accelerated-scan by its name, if it is installed and `a` has two dimensions on a GPU.

    It scans (batch, channels, length).
    """
    if not a.is_cuda or a.dim() != 2:
        return {}
    try:
        from accelerated_scan.scalar import scan
    except ImportError:
        return {}

    def way(a: Tensor, b: Tensor) -> Tensor:
        rows = (8, -1, a.shape[1])
        result: Tensor = scan(a.view(rows), b.view(rows)).view_as(b)
        return result

    return {"accelerated-scan": way}


def _hgrn(a: Tensor, b: Tensor) -> Callable[[], Tensor] | str:
    """Return fla's scan h = exp(g)*h + x, which takes the logarithm of the factor, or why not."""
    if not a.is_cuda or a.dim() != 3:
        return "needs flash-linear-attention, a GPU, and length before channels"
    try:
        from fla.ops.hgrn import fused_recurrent_hgrn
    except ImportError as missing:
        return str(missing)
    logarithms = a.log()
    return lambda: fused_recurrent_hgrn(b, logarithms)[0]


# --- for people -----------------------------------------------------------------------------


def print_scan(figures: dict[str, Any]) -> None:
    """Print a line per way and case: microseconds, and the multiple of a copy of the same bytes."""
    write_line(f"{figures['device']}; microseconds, and times a copy that moves the same bytes")
    for name, case in figures["cases"].items():
        shape = " x ".join(map(str, case["shape"]))
        for title, rows in _tables(case):
            copy = f", copy {rows['copy_seconds'] * 1e6:.1f}" if "copy_seconds" in rows else ""
            write_line(f"{name} {title}({shape}){copy}")
            for way, row in rows.items():
                if isinstance(row, dict):
                    write_line(f"  {way:28}{cells(row, 'of_copy')}")
    write_line("largest error at 2**20 values of N(0, 100):")
    for name, error in figures["accuracy"].items():
        write_line(f"  {name:28}{error:.4g}")


def _tables(case: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    if "forward" in case:
        return [("forward ", case["forward"]), ("backward ", case["backward"])]
    return [("", case)]
