"""`stormd bench ternary`: ternary products beside those of NumPy, torch and bitblas.

All peers of a row are timed in turns within one run, on equally many threads, and with operands
made from a fixed seed. A peer that is missing is left out and named. Times are seconds and include
everything that a caller waits for.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from storm_bench.contenders import seconds_of
from stormd.commands.arguments import positive_int
from stormd.output import write_line

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["add_ternary_arguments", "measure_ternary", "print_ternary"]

_VALUES: Final = 1 << 20
_PARAMETERS: Final = 100_000_000
_BITS: Final = {"ternary": 2, "int8": 8, "float16": 16, "float32": 32}
_NET: Final = (512, 256, 10)
_BATCH: Final = 32
_WARM_CALLS: Final = 3

_Peers = dict[str, Callable[[], object]]


def add_ternary_arguments(ternary: argparse.ArgumentParser) -> None:
    """Add the arguments that say what is to be measured, and how."""
    ternary.add_argument(
        "--sizes", type=positive_int, nargs="+", default=[2048, 8192], help="rows and columns of w"
    )
    ternary.add_argument("--rounds", type=positive_int, default=51, help="the median counts")
    ternary.add_argument("--threads", type=positive_int, default=1, help="threads of each backend")


def measure_ternary(args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of this machine."""
    import numpy as np
    from storm_kernels import backends

    rng = np.random.default_rng(0)
    rows: dict[str, dict[str, dict[str, float]]] = {}
    with _torch_threads(args.threads):
        for size in args.sizes:
            peers = _products(rng, size, args.threads)
            rows[f"product {size} x {size}"] = _timed(peers, args.rounds)
        for name, peers in _vectors(rng).items():
            rows[name] = _timed(peers, args.rounds)
        rows[f"network {'-'.join(map(str, _NET))}, {_BATCH} x"] = _timed(
            _network(rng, args.threads), args.rounds
        )
    return {
        "backends": {name: info.detail for name, info in backends("ternary").items()},
        "threads": args.threads,
        "left_out": {"bitblas": _why_no_bitblas()},
        "seconds": rows,
        "memory_bytes": {name: _PARAMETERS * bits // 8 for name, bits in _BITS.items()},
    }


def print_ternary(figures: dict[str, Any]) -> None:
    """Print a table per row, and the memory that 100 million weights take."""
    variants = ", ".join(f"{name}: {detail}" for name, detail in figures["backends"].items())
    write_line(f"{variants}; threads: {figures['threads']}")
    for name, peers in figures["seconds"].items():
        write_line(f"\n{name:34} {'median us':>12} {'best us':>12} {'cold us':>12}")
        for peer, times in peers.items():
            columns = (times[kind] for kind in ("median", "best", "cold"))
            write_line(f"  {peer:32} " + " ".join(f"{1e6 * one:12.1f}" for one in columns))
    write_line(f"\n{_PARAMETERS // 10**6} million weights")
    for name, nbytes in figures["memory_bytes"].items():
        write_line(f"  {name:32} {nbytes / 2**20:12.1f} MiB")
    for name, why in figures["left_out"].items():
        write_line(f"left out: {name}: {why}")


# --- what is timed ------------------------------------------------------------------------------


def _products(rng: np.random.Generator, size: int, threads: int) -> _Peers:
    """Return w @ x for one vector x by all peers; torch and NumPy have w in the dtype they need."""
    import torch
    from storm_kernels.ternary import TernaryTensor

    values = _values(rng, size, size)
    w = TernaryTensor.encode(values)
    x8 = rng.integers(-128, 128, size).astype("int8")
    x32 = rng.standard_normal(size).astype("float32")
    xt = TernaryTensor.encode(_values(rng, size))
    wide = values.astype("float32")
    w32, given32 = torch.from_numpy(wide), torch.from_numpy(x32)
    w16, given16 = w32.bfloat16(), given32.bfloat16()
    w8, given8 = torch.from_numpy(values).T, torch.from_numpy(x8)[None]
    peers: _Peers = {
        "ours, int8 x": lambda: w.matvec(x8, threads=threads),
        "ours, ternary x": lambda: w.matvec(xt, threads=threads),
        "ours, float32 x": lambda: w.matvec(x32, threads=threads),
        "ours, bfloat16 x": lambda: w.matvec(given16, threads=threads),
        "NumPy float32": lambda: wide @ x32,
        "torch float32": lambda: w32 @ given32,
        "torch bfloat16": lambda: w16 @ given16,
        "torch int8": lambda: torch._int_mm(given8, w8),
    }
    return peers


def _vectors(rng: np.random.Generator) -> dict[str, _Peers]:
    """Return encode, decode and dot of a million values."""
    from storm_kernels.ternary import decode, dot, encode

    a, b = _values(rng, _VALUES), _values(rng, _VALUES)
    wide, planes, other = a.astype("float32"), encode(a), encode(b)
    return {
        "encode, 1 Mi values": {
            "ours, int8": lambda: encode(a),
            "ours, float32": lambda: encode(wide),
            "NumPy oracle, int8": lambda: encode(a, backend="numpy"),
        },
        "decode, 1 Mi values": {
            "ours, int8": lambda: decode(*planes, _VALUES),
            "NumPy oracle, int8": lambda: decode(*planes, _VALUES, backend="numpy"),
        },
        "dot, 1 Mi values": {
            "ours": lambda: dot(*planes, *other),
            "NumPy oracle": lambda: dot(*planes, *other, backend="numpy"),
            "NumPy float32": lambda: wide @ wide,
        },
    }


def _network(rng: np.random.Generator, threads: int) -> _Peers:
    import torch
    from storm_kernels.ternary.nn import SimpleRotorNet

    net = SimpleRotorNet(*_NET)
    x = rng.standard_normal((_BATCH, _NET[0])).astype("float32")
    dense = torch.nn.Sequential(
        torch.nn.Linear(_NET[0], _NET[1]), torch.nn.ReLU(), torch.nn.Linear(_NET[1], _NET[2])
    )
    given = torch.from_numpy(x)
    return {
        "SimpleRotorNet": lambda: net.forward(x, threads=threads),
        "SimpleRotorNet, NumPy oracle": lambda: net.forward(x, backend="numpy"),
        "torch float32": torch.no_grad()(lambda: dense(given)),
    }


def _values(rng: np.random.Generator, *shape: int) -> NDArray[np.int8]:
    values: NDArray[np.int8] = rng.integers(-1, 2, shape).astype("int8")
    return values


def _why_no_bitblas() -> str:
    if find_spec("bitblas") is None:
        return "not installed"
    return "it has kernels for CUDA alone: tests/bench/ternary_gpu.py is for GPUs"


# --- how ----------------------------------------------------------------------------------------


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _timed(peers: _Peers, rounds: int) -> dict[str, dict[str, float]]:
    """Time all peers in turns, so that disturbances of the machine affect them alike.

    In a turn, the first call finds the other peers' data in the caches, and the next calls find
    their own. "cold" is the median of the first calls, "median" and "best" are of the next ones.
    """
    cold: dict[str, list[float]] = {}
    warm: dict[str, list[float]] = {}
    for name, call in peers.items():
        try:
            call()
        except RuntimeError:
            continue  # torch has no such product on this processor
        cold[name], warm[name] = [], []
    for _ in range(rounds):
        for name, times in cold.items():
            times.append(seconds_of(peers[name], "cpu"))
            warm[name] += [seconds_of(peers[name], "cpu") for _ in range(_WARM_CALLS)]
    return {
        name: {"median": median(warm[name]), "best": min(warm[name]), "cold": median(times)}
        for name, times in cold.items()
    }
