"""A matrix product in one process beside a store stream at full speed from another.

    PYTHONPATH=tests python -m bench.beside_gemm --json tests/bench/results/beside_gemm.json

Both are processes of their own; the product is measured alone and beside, in turns, so that clocks
and heat are the same for both. What stays true: a pair counts only where the stream really moved
bytes beside the product, and none while it was alone.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Self

import storm_client as storm
import torch
from bench.recording import parser_of, record
from storm_bench.child_daemon import ChildDaemon
from storm_bench.devices import device_here, mps_is_on
from torch import Tensor

MIB = 1 << 20
PRODUCT = {"cpu": 256, "cuda": 8192}
"""The side of the squares that are multiplied."""

TENSOR_BYTES = {"cpu": MIB, "cuda": 64 * MIB}
TENSORS = 16
ROUNDS = 6
"""That the pool holds: two are kept, nearly three in flight at the most."""

ANSWER_SECONDS = 120.0
SECONDS = 1.0
"""Of each measurement."""


# --- the child that multiplies --------------------------------------------------------------


def multiply(device: str, side: int) -> None:
    """For each line that comes in, print the TFLOP/s of products during `SECONDS`."""
    one, other = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(one)
    _products(one, other, out)
    _say("ready")
    for _ in sys.stdin:
        _say(_products(one, other, out))


def _products(one: Tensor, other: Tensor, out: Tensor) -> float:
    """Return the TFLOP/s of back-to-back products; the queue is never empty, nor ever long."""
    flop, batch, done = 2.0 * len(one) ** 3, 8, 0
    _synchronize(one.device)
    begin = time.perf_counter()
    marks = [_mark(one.device)]
    while time.perf_counter() - begin < SECONDS:
        for _ in range(batch):
            torch.mm(one, other, out=out)
        done += batch
        marks.append(_mark(one.device))
        if len(marks) > 2:
            marks.pop(0)()  # wait until all but the last batch is done
    _synchronize(one.device)
    return done * flop / (time.perf_counter() - begin) / 1e12


def _mark(device: torch.device) -> Callable[[], object]:
    """Return what waits until the device has come this far."""
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.Event(blocking=True)
    event.record()
    return event.synchronize


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# --- the child that stores ------------------------------------------------------------------


class _Save(torch.autograd.Function):
    """Saves tensors; nobody asks for them again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *saved: Tensor) -> Tensor:
        ctx.save_for_backward(*saved)
        return x.view_as(x)


def store(device: str, address: str, codec: str, nbytes: int) -> None:
    """Store without end between the lines "go" and "stop"; answer each when it is so.

    The tensors, of `nbytes` each, are results, as activations are, and the process itself hardly
    uses the device.
    """
    count = nbytes // 2
    tensors = [_result(torch.randn(count, device=device).bfloat16()) for _ in range(TENSORS)]
    leaf = torch.zeros(1, device=device, requires_grad=True)
    with storm.connect(address, embedded="never", timeout=30.0) as client:
        offload = client.offload(torch.nn.Identity(), min_bytes=MIB, codec=codec)
        going, ended = threading.Event(), threading.Event()
        orders = threading.Thread(target=_take_orders, args=(going, ended), daemon=True)
        rounds = deque([_store_all(offload, leaf, tensors)], maxlen=2)
        _say("ready")
        orders.start()
        while not ended.is_set():
            was_going = going.wait()
            while going.is_set() and not ended.is_set():
                rounds.append(_store_all(offload, leaf, tensors))
            if was_going and not ended.is_set():
                offload.stats()  # waits until the daemon has all of it
                _synchronize(leaf.device)
                _say("stopped")


def _store_all(offload: storm.Offload, leaf: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Save every tensor; return what keeps them saved."""
    with torch.no_grad():  # changed, so that none is found to be stored already
        torch._foreach_add_([tensor[:1] for tensor in tensors], 1)
    with offload:
        return [_Save.apply(leaf, tensor) for tensor in tensors]


def _result(tensor: Tensor) -> Tensor:
    """Return what an operation has made of a tensor."""
    return tensor.requires_grad_() * 1


def _take_orders(going: threading.Event, ended: threading.Event) -> None:
    for line in sys.stdin:
        if line.strip() == "go":
            going.set()
        else:
            going.clear()
    ended.set()
    going.set()


def _say(word: object) -> None:
    print(word, flush=True)


# --- the parent -----------------------------------------------------------------------------


class Child:
    """One of the two processes, told by lines and answering so; a context manager."""

    def __init__(self, *arguments: str, gives_way: bool) -> None:
        """Start it; with `gives_way` MPS serves it after others (CUDA_MPS_CLIENT_PRIORITY)."""
        command = [sys.executable, "-m", "bench.beside_gemm", *arguments]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | ({"CUDA_MPS_CLIENT_PRIORITY": "1"} if gives_way else {}),
        )

    def tell(self, order: str) -> None:
        self._process.stdin.write(order + "\n")
        self._process.stdin.flush()

    def hear(self) -> str:
        timer = threading.Timer(ANSWER_SECONDS, self._process.kill)
        timer.start()
        line = self._process.stdout.readline().strip()
        timer.cancel()
        assert line, f"a child has ended, or said nothing for {ANSWER_SECONDS:g} s"
        return line

    def __enter__(self) -> Self:
        assert self.hear() == "ready"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def measure(codec: str, device: str, nbytes: int, how: argparse.Namespace) -> dict[str, Any]:
    """Return the product's speed alone and beside the store stream, in pairs."""
    part, gives_way, side = how.part_bytes, how.clients_give_way, PRODUCT[device]
    flags = [f"--pool-bytes={ROUNDS * TENSORS * nbytes}", f"--device={device}"]
    if part:
        flags.append(f"--part-bytes-{device}={part}")
    with ExitStack() as stack:
        daemon = stack.enter_context(ChildDaemon(flags=flags, start_seconds=120.0))
        stored = ("--store", device, daemon.address, codec, str(nbytes))
        storing = stack.enter_context(Child(*stored, gives_way=gives_way))
        multiplied = ("--multiply", device, str(side))
        product = stack.enter_context(Child(*multiplied, gives_way=gives_way))
        found = [_pair(daemon, storing, product) for _ in range(how.pairs)]
    shares = [one["beside_tflops"] / one["alone_tflops"] for one in found]
    return {
        "codec": codec,
        "tensor_bytes": nbytes,
        "side": side,
        "daemon_flags": flags,
        "share": statistics.median(shares),
        "share_least": min(shares),
        "share_most": max(shares),
        "stored_bytes_per_second": statistics.median(one["bytes_per_second"] for one in found),
        "link_bytes_per_second": statistics.median(one["link_bytes_per_second"] for one in found),
        "pairs": found,
    }


def _pair(daemon: ChildDaemon, storing: Child, product: Child) -> dict[str, float]:
    quiet = _moved(daemon)
    product.tell("measure")
    alone = float(product.hear())
    assert _moved(daemon) == quiet, "the store stream was not still"
    storing.tell("go")
    begin, before = time.monotonic(), _moved(daemon)
    product.tell("measure")
    beside = float(product.hear())
    seconds = time.monotonic() - begin
    moved, sent = (after - earlier for after, earlier in zip(_moved(daemon), before, strict=True))
    storing.tell("stop")
    assert storing.hear() == "stopped"
    assert moved, "the store stream moved nothing beside the product"
    assert not any(daemon.status()["counters"]["rejected"].values()), "stores were refused"
    return {
        "alone_tflops": alone,
        "beside_tflops": beside,
        "bytes_per_second": moved / seconds,
        "link_bytes_per_second": sent / seconds,
    }


def _moved(daemon: ChildDaemon) -> tuple[int, int]:
    """Return the clients' bytes that the daemon has stored so far, and those of their blobs."""
    stored = daemon.status()["throughput"]["store"]
    return int(stored["raw_bytes"]), int(stored["blob_bytes"])


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--codecs", nargs="+", default=["ancf", "raw"])
    parser.add_argument("--tensor-mib", type=int, help="default: 64 on a GPU, else 1")
    parser.add_argument("--part-bytes", metavar="SIZE", help="of the daemon; default: its own")
    parser.add_argument(
        "--clients-give-way", action="store_true", help="under MPS: at its lower priority"
    )
    parser.add_argument("--store", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--multiply", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.store:
        store(*args.store[:3], int(args.store[3]))
        return
    if args.multiply:
        multiply(args.multiply[0], int(args.multiply[1]))
        return
    device = device_here()
    nbytes = args.tensor_mib * MIB if args.tensor_mib else TENSOR_BYTES[device]
    figures = [measure(codec, device, nbytes, args) for codec in args.codecs]
    record(args.json, {"mps": mps_is_on(device), "figures": figures})
    for one in figures:
        print({name: value for name, value in one.items() if name != "pairs"})


if __name__ == "__main__":
    main()
