"""`stormd bench gemm`: products that encode their results, beside cuBLAS and separate encoding.

All ways to compute a case run in one process on the same tensors, a few calls of each in turns. So
a card that slows down as it gets warm slows all of them. A way that cannot run here is in the table
with the reason. "forward" and "backward" are those of a gated MLP's two products and the operations
that join them; "layer" is the whole MLP with all its gradients.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
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

__all__ = ["CASES", "Case", "add_gemm_arguments", "measure_gemm", "print_gemm"]

_SEED: Final = 46
_CALLS: Final = 4
"""Calls that are timed together; the first finds the caches as the previous way left them."""

_PLAIN: Final = "cuBLAS"
_APART: Final = "cuBLAS, encoded apart"
_STORM: Final = "storm"


@dataclass(frozen=True, slots=True)
class Case:
    """Shapes of an MLP: `rows` tokens of `width` values, and `hidden` values in between."""

    rows: int
    width: int
    hidden: int


CASES: Final = {
    "cuda": {
        "W1": Case(8192, 4096, 10880),
        "llama-8b": Case(8192, 4096, 14336),
        "llama-1b": Case(8192, 2048, 8192),
        "llama-70b": Case(4096, 8192, 28672),
        "gpt": Case(8192, 1024, 2688),
    },
    "cpu": {"small": Case(256, 128, 384)},
}
"""Cases by device: the GPT of `stormd bench train` at widths 4096 and 1024, and Llamas."""

_TILINGS: Final = (
    *((1, group, 0) for group in (8, 16, 32)),
    *((2, group, lead) for group in (8, 16, 32) for lead in (0, 3)),
)
"""Cluster, group and lead of the tilings that are compared."""


def add_gemm_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say what is to be measured, and how."""
    names = sorted({name for cases in CASES.values() for name in cases})
    parser.add_argument(
        "--cases", nargs="+", choices=names, help="what to measure (default: all of the device's)"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where")
    parser.add_argument("--rounds", type=positive_int, default=15, help="the median counts")
    parser.add_argument(
        "--compiled",
        action="store_true",
        help="also torch.compile with max-autotune, which takes a minute a case (default: no)",
    )
    parser.add_argument(
        "--tilings", action="store_true", help="also every tiling of the kernel (default: no)"
    )


def measure_gemm(args: argparse.Namespace) -> dict[str, Any]:
    """Measure every case and return the figures.

    Raises:
        ChildFailed: a result is wrong.
    """
    import torch
    from storm_kernels import gemm

    device = device_here(args.device)
    cases = CASES[device]
    found: dict[str, Any] = {}
    for name in args.cases or cases:
        if name not in cases:
            found[name] = {"skipped": f"it is not for {device}"}
            continue
        found[name] = _Bench(cases[name], device, args).figures()
        sys.stderr.write(f"{name} measured\n")
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "backends": {name: info.detail for name, info in gemm.backends().items()},
        "versions": package_versions(("torch", "triton")),
        "calls": _CALLS,
        "cases": found,
    }


class _Bench:
    """Measures one case; every figure is the median of `rounds`, in seconds per call."""

    def __init__(self, case: Case, device: str, args: argparse.Namespace) -> None:
        self._case, self._device, self._args = case, device, args
        self._ways = _Ways(case, device)

    def figures(self) -> dict[str, Any]:
        """Return the times of all ways, and the bytes that they have to move."""
        case, ways = self._case, self._ways
        ways.check()
        found: dict[str, Any] = {"shape": [case.rows, case.width, case.hidden]}
        found["product"] = self._table(ways.product(tilings=self._args.tilings))
        found["forward"] = self._table(
            ways.forward(compiled=self._args.compiled, tilings=self._args.tilings)
        )
        found["backward"] = self._table(ways.backward())
        found["layer"] = self._table(ways.layer())
        found["ratio"] = ways.ratio()
        found["counted_bytes"] = _counted_bytes(case, found["ratio"])
        return found

    def _table(self, ways: dict[str, Contender]) -> dict[str, dict[str, Any]]:
        """Time all ways in turns; the others are compared with the first."""
        rows: dict[str, dict[str, Any]] = {}
        times: dict[str, list[float]] = {}
        for name, way in ways.items():
            if isinstance(way, str):
                rows[name] = {"skipped": way}
                continue
            try:
                for _ in range(3):
                    way()
            except Exception as error:  # noqa: BLE001 (others' code: any of its failures is a reason)
                rows[name] = skipped(error)
                continue
            rows[name], times[name] = {}, []
        for _ in range(self._args.rounds):
            for name, seconds in times.items():
                way = ways[name]
                assert not isinstance(way, str)
                seconds.append(seconds_of(way, self._device, _CALLS))
        first = statistics.median(next(iter(times.values()))) if times else 0.0
        for name, seconds in times.items():
            median = statistics.median(seconds)
            rows[name] = {"seconds": median, "of_first": median / first}
        return rows


class _Ways:
    """The timed ways to compute a case, on tensors that all ways share."""

    def __init__(self, case: Case, device: str) -> None:
        import torch

        self._device = device
        generator = torch.Generator(device).manual_seed(_SEED)

        def normal(rows: int, columns: int, scale: float) -> Tensor:
            made = torch.randn(rows, columns, generator=generator, device=device)
            return made.mul_(scale).bfloat16()

        self.x = normal(case.rows, case.width, 1.0)
        self.gate = normal(case.hidden, case.width, case.width**-0.5)
        self.up = normal(case.hidden, case.width, case.width**-0.5)
        self.down = normal(case.width, case.hidden, case.hidden**-0.5)
        self.grad = normal(case.rows, case.hidden, 1.0)

    def check(self) -> None:
        """Raise ChildFailed if storm's products are not close to PyTorch's."""
        from storm_kernels import gemm

        h, gate, up = gemm.gated_mlp(self.x, self.gate, self.up)
        pairs = ((h, self._plain()), (gate.decode(), self._linear(self.gate)))
        for found, expected in (*pairs, (up.decode(), self._linear(self.up))):
            error = (found.float() - expected.float()).norm() / expected.float().norm()
            if not error < 1e-2:
                raise ChildFailed(f"storm's product is wrong by {error:.1e}: report this as a bug")

    def product(self, *, tilings: bool) -> dict[str, Contender]:
        """Return the ways to compute one product, not encoded and encoded."""
        from storm_kernels.gemm import hopper

        ways: dict[str, Contender] = {_PLAIN: partial(self._linear, self.gate)}
        if why := self._why_not():
            return ways | {_STORM: why}
        (window,) = hopper.windows(self.x, (self.gate,))
        ways[_STORM] = partial(hopper.product, self.x, self.gate)
        ways["storm, encoded too"] = partial(hopper.product, self.x, self.gate, window=window)
        for numbers in _TILINGS if tilings else ():
            tiling = hopper.Tiling(*numbers)
            ways[_tiled(tiling)] = partial(hopper.product, self.x, self.gate, tiling=tiling)
        return ways

    def forward(self, *, compiled: bool, tilings: bool) -> dict[str, Contender]:
        """Return the ways to compute both products and join them, gate and up encoded or not."""
        from storm_kernels.gemm import hopper

        ways: dict[str, Contender] = {_APART: self._encoded_apart(), _PLAIN: self._plain}
        if compiled:
            ways["compiled, max-autotune"] = self._compiled()
        if why := self._why_not():
            return ways | {_STORM: why}
        weights = (self.gate, self.up)
        first, second = hopper.windows(self.x, weights)
        gated = partial(hopper.gated, self.x, weights, "silu")
        ways[_STORM] = partial(gated, coded=(first, second))
        ways["storm, not encoded"] = gated
        for numbers in _TILINGS if tilings else ():
            tiling = hopper.Tiling(*numbers)
            ways[_tiled(tiling)] = partial(gated, coded=(first, second), tiling=tiling)
        return ways

    def backward(self) -> dict[str, Contender]:
        """Return the ways to compute gate's and up's gradients from both, and to recompute h."""
        from storm_kernels.gemm import hopper

        gate, up = self._linear(self.gate), self._linear(self.up)
        ways: dict[str, Contender] = {_PLAIN: partial(self._gradients, gate, up)}
        if why := self._why_not():
            return ways | {_STORM: why}
        first, second = hopper.windows(self.x, (self.gate, self.up))
        _, codes = hopper.gated(self.x, (self.gate, self.up), "silu", coded=(first, second))
        assert codes is not None
        bases = (first.base, second.base)
        ways[_STORM] = partial(hopper.backward, self.grad, codes.blobs, bases, "silu")
        return ways

    def layer(self) -> dict[str, Contender]:
        """Return the ways to run the whole MLP, both passes: PyTorch's operations, and GatedMLP."""
        import torch
        from storm_kernels.nn import GatedMLP

        mlp = GatedMLP(self.x.shape[1], self.gate.shape[0], device="meta")
        for name, weight in (("gate", self.gate), ("up", self.up), ("down", self.down)):
            getattr(mlp, f"{name}_proj").weight = torch.nn.Parameter(weight)
        x = self.x.clone().requires_grad_()
        y = self.x.clone()
        sources = [x, *mlp.parameters()]

        def step(forward: Callable[[Tensor], Tensor]) -> object:
            return torch.autograd.grad(forward(x), sources, y)

        ways: dict[str, Contender] = {_PLAIN: partial(step, mlp._separately)}
        return ways | {_STORM: self._why_not() or partial(step, mlp)}

    def ratio(self) -> float:
        """Return how many times smaller gate and up are when encoded."""
        from storm_kernels import gemm

        _, gate, up = gemm.gated_mlp(self.x, self.gate, self.up)
        return (gate.raw_nbytes + up.raw_nbytes) / (gate.nbytes + up.nbytes)

    def _why_not(self) -> str:
        """Return why the kernel cannot run on these tensors, or an empty text if it can."""
        from storm_kernels import gemm
        from storm_kernels.gemm import hopper

        if hopper.takes(self.x, (self.gate, self.up)):
            return ""
        return gemm.backends()["cuda"].detail

    def _linear(self, weight: Tensor) -> Tensor:
        from torch.nn import functional

        return functional.linear(self.x, weight)

    def _plain(self) -> Tensor:
        from torch.nn import functional

        return functional.silu(self._linear(self.gate)) * self._linear(self.up)

    def _compiled(self) -> Callable[[], object]:
        import torch
        from torch.nn import functional

        def way(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
            return functional.silu(functional.linear(x, gate)) * functional.linear(x, up)

        made = torch.compile(way, mode="max-autotune-no-cudagraphs")
        return partial(made, self.x, self.gate, self.up)

    def _gradients(self, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        import torch
        from torch.nn import functional

        activated = functional.silu(gate)
        of_gate = torch.ops.aten.silu_backward(self.grad * up, gate)
        return of_gate, self.grad * activated, activated * up

    def _encoded_apart(self) -> Contender:
        """Return the way that computes gate and up, joins them, and encodes each separately."""
        from torch.nn import functional

        if self._device == "cpu":
            from storm_kernels import gemm

            return partial(gemm.gated_mlp, self.x, self.gate, self.up)
        encode = _encoder(self.grad)

        def way() -> object:
            gate, up = self._linear(self.gate), self._linear(self.up)
            h = functional.silu(gate) * up
            return h, encode(gate), encode(up)

        return way


def _encoder(like: Tensor) -> Callable[[Tensor], Tensor]:
    """Return an asynchronous encoder on the current stream, for tensors like this one."""
    import torch
    from storm_kernels.ancf import max_encoded_bytes
    from storm_kernels.ancf.cuda import CudaCodec
    from storm_kernels.ancf.dtypes import dtype_of

    dtype, nbytes = dtype_of(like.dtype), like.nbytes
    codec = CudaCodec(like.get_device())

    def new(count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8, device=like.device)

    scratch, result = new(codec.scratch_bytes(nbytes, dtype)), new(64)
    room = max_encoded_bytes(nbytes, dtype)

    def encode(tensor: Tensor) -> Tensor:
        blob = new(room)
        stream = torch.cuda.current_stream().cuda_stream
        codec.encode_async(
            tensor.data_ptr(), nbytes, dtype, blob.data_ptr(), room, scratch.data_ptr(),
            result.data_ptr(), stream, checksum=False,
        )  # fmt: skip
        return blob

    return encode


def _tiled(tiling: Any) -> str:
    return f"storm, cluster {tiling.cluster}, group {tiling.group}, lead {tiling.lead}"


def _counted_bytes(case: Case, ratio: float) -> dict[str, float]:
    """Return the bytes that a forward pass moves, each tensor read or written once per kernel."""
    x, weight = 2 * case.rows * case.width, 2 * case.width * case.hidden
    raw = 2 * case.rows * case.hidden
    code, slots = raw / ratio, 2 * raw / 8  # a sector of 32 bytes in 128 elements, both ways
    products = 2 * (x + weight + raw)
    joined = (raw + raw) + 3 * raw  # silu, then the product with up
    return {
        _APART: products + joined + 2 * (raw + code),
        _STORM: x + 2 * weight + raw + 2 * (code + slots),
    }


# --- for people -----------------------------------------------------------------------------


def print_gemm(figures: dict[str, Any]) -> None:
    """Print a line per way: microseconds, and the multiple of its table's first way."""
    write_line(f"{figures['device']}; microseconds, and times the first of each table")
    for name, case in figures["cases"].items():
        if "skipped" in case:
            write_line(f"{name}: left out: {case['skipped']}")
            continue
        shape = " x ".join(map(str, case["shape"]))
        write_line(f"{name} ({shape}), gate and up encoded {case['ratio']:.3f} times smaller")
        for table in ("product", "forward", "backward", "layer"):
            write_line(f"  {table}")
            for way, row in case[table].items():
                write_line(f"    {way:36}{cells(row, 'of_first')}")
        counted = case["counted_bytes"]
        write_line(
            f"  bytes by count: {counted[_STORM] / 1e6:.0f} MB of {counted[_APART] / 1e6:.0f} MB"
        )
