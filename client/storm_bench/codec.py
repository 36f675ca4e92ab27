"""`stormd bench codec`: the lossless codec on the kinds of tensors that autograd saves.

Every tensor is made from a fixed seed. Its ratio counts only if the tensor is decoded bit for bit,
and is the same on every machine. The speeds are this machine's, with one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from storm_bench.contenders import seconds_of
from stormd.errors import ChildFailed
from stormd.output import write_line

if TYPE_CHECKING:
    from torch import Generator, Tensor

__all__ = ["Figures", "measure_codec", "print_captured", "print_codec"]


@dataclass(frozen=True, slots=True)
class Figures:
    """Ratio of raw to stored bytes, and raw bytes a second each way, for one kind of tensor."""

    kind: str
    speed: str
    mode: str
    ratio: float
    encode_bytes_per_second: float
    decode_bytes_per_second: float


def measure_codec(values: int, rounds: int) -> list[dict[str, Any]]:
    """Return the figures of every kind with `values` values each, as JSON values.

    Raises:
        ChildFailed: a decoded tensor differs from the original.
    """
    return [
        asdict(_measure(kind, tensor, speed, rounds))
        for kind, tensor in _kinds(values)
        for speed in ("fast", "dense")
    ]


def print_codec(figures: list[dict[str, Any]]) -> None:
    """Print the figures as a table."""
    write_line(f"{'kind of tensor':34} {'speed':6} {'ratio':>6} {'encode':>12} {'decode':>12}")
    for one in figures:
        rates = (one["encode_bytes_per_second"] / 1e9, one["decode_bytes_per_second"] / 1e9)
        speeds = " ".join(f"{rate:>7.2f} GB/s" for rate in rates)
        write_line(f"{one['kind']:34} {one['speed']:6} {one['ratio']:>6.2f} {speeds}")


def print_captured(families: list[dict[str, Any]]) -> None:
    """Print what `storm_bench.activations` measured, one line per family of models."""
    head = f"{'captured from a training step':34} {'bound':>8} {'fast':>8} {'dense':>8}"
    write_line(f"{head}  reached of the bound")
    for family in families:
        ratios = " ".join(f"{family[f'{kind}_ratio']:7.3f}x" for kind in ("bound", "fast", "dense"))
        shares = f"{family['fast_of_bound']:.1%}, {family['dense_of_bound']:.1%}"
        write_line(f"{family['family']:34} {ratios}  {shares}")


def _kinds(values: int) -> Iterator[tuple[str, Tensor]]:
    import torch

    def normal(generator: Generator) -> Tensor:
        return torch.randn(values, generator=generator)

    makers: dict[str, Callable[[Generator], Tensor]] = {
        "bfloat16, dense N(0,1)": lambda g: normal(g).bfloat16(),
        "bfloat16, after ReLU": lambda g: normal(g).relu().bfloat16(),
        "bfloat16, after squared ReLU": lambda g: normal(g).relu().square().bfloat16(),
        "float16, dense N(0,1)": lambda g: normal(g).half(),
        "float32, dense N(0,1)": normal,
        "float32 that holds bfloat16": lambda g: normal(g).bfloat16().float(),
        "bool, dropout mask at 0.1": lambda g: torch.rand(values, generator=g) > 0.1,
        "uint8, random": lambda g: torch.randint(0, 256, (values,), dtype=torch.uint8, generator=g),
    }
    for kind, make in makers.items():
        yield kind, make(torch.Generator().manual_seed(1))


def _measure(kind: str, tensor: Tensor, speed: str, rounds: int) -> Figures:
    import torch
    from storm_kernels import ancf

    blob = ancf.encode(tensor, speed=speed)
    back = torch.empty_like(tensor)
    if not torch.equal(ancf.decode(blob, out=back).view(torch.uint8), tensor.view(torch.uint8)):
        raise ChildFailed(f"{kind} came back changed from {speed}: report this as a bug")
    nbytes = tensor.numel() * tensor.element_size()
    return Figures(
        kind=kind,
        speed=speed,
        mode=blob.mode,
        ratio=blob.ratio,
        encode_bytes_per_second=nbytes / _best(rounds, lambda: ancf.encode(tensor, speed=speed)),
        decode_bytes_per_second=nbytes / _best(rounds, lambda: ancf.decode(blob, out=back)),
    )


def _best(rounds: int, work: Callable[[], object]) -> float:
    """Return the seconds of the fastest round."""
    return min(seconds_of(work, "cpu") for _ in range(rounds))
