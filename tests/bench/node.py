"""What the links of a node carry through the daemon, beside plain copies of pinned memory.

    stormd run --mps=on --pool-bytes 96GiB -- python tests/bench/node.py --json FILE
    stormd run --pool-bytes 2GiB -- python tests/bench/node.py --device cpu --seconds 0.5

A process for each device copies, or is a client that stores tensors in a forward pass and restores
them in the backward pass: first each alone, then all at once. Each way begins anew for all, so none
goes the other way meanwhile. Out ends when all of a client's tensors lie in the pool, none on the
device. What stays true: a first round compares every bit, each wait has a deadline, and no process
is left behind. What fails is a row, and the status is then 1.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import ExitStack, suppress
from functools import partial
from itertools import product
from math import nan
from statistics import median
from typing import Any

import psutil
import storm_client as storm
import torch
from recording import parser_of, record
from storm_bench.child_daemon import ChildDaemon
from storm_bench.devices import device_here, mps_is_on
from storm_bench.interrupts import noted_interrupts
from storm_bench.link import _Save
from torch import Tensor

from stormd.errors import NoDaemon
from stormd.memory.numa import NODES, near_gpus, nodes_cpus, prefer_node
from stormd.query import ADDRESS_VARIABLE, StatusQuery
from stormd.supervise.processes import die_with_parent

MIB = 1 << 20
WAYS, CODECS = ("out", "back"), ("raw", "ancf")
CHUNKS, CHUNK_BYTES = 4, {"cuda": 256 * MIB, "cpu": 8 * MIB}  # of pinned memory for each way
TENSORS = {"cuda": (32, 64 * MIB), "cpu": (16, MIB)}  # of a client's round, and the bytes of each
COMPILE_SECONDS = 120.0  # for which a new daemon may store raw, as it compiles its codec
START_SECONDS, ANSWER_SECONDS = 120.0, 60.0  # that a child may take
LEAD_SECONDS = 0.02  # from an order to its begin, by the clock that all processes share

Row = dict[str, Any]


class Copies:
    """Copies between pinned memory and a device, on a stream for each way."""

    def __init__(self, device: torch.device) -> None:
        self._device, nbytes, is_cuda = device, CHUNK_BYTES[device.type], device.type == "cuda"
        full, stream = partial(torch.ones, dtype=torch.uint8), partial(torch.cuda.Stream, device)
        self._near = {way: full(nbytes, device=device) for way in WAYS}
        self._host = {way: full(CHUNKS, nbytes, pin_memory=is_cuda) for way in WAYS}
        self._streams = {way: stream() if is_cuda else None for way in WAYS}
        synchronize(device)

    def answer(self, order: Row) -> Row:
        """Copy for the seconds of the order, as much each way; return bytes and seconds."""
        ways = WAYS if order["do"] == "both" else (order["do"],)
        begin, nbytes, taken = time.perf_counter(), 0, 0.0
        while taken < order["seconds"]:
            for chunk, way in product(range(CHUNKS), ways):
                pair = self._near[way], self._host[way][chunk]
                source, target = pair if way == "out" else reversed(pair)
                with torch.cuda.stream(self._streams[way]):  # which does nothing for None
                    target.copy_(source, non_blocking=True)
            synchronize(self._device)
            nbytes += CHUNKS * CHUNK_BYTES[self._device.type]
            taken = time.perf_counter() - begin
        return {way: {"bytes": nbytes, "seconds": taken} for way in ways}


class Client:
    """A trainer whose step does nothing but save tensors."""

    def __init__(self, device: torch.device, address: str) -> None:
        count, nbytes = TENSORS[device.type]
        self._device, self._leaf = device, torch.zeros(1, device=device, requires_grad=True)
        normal = partial(torch.randn, nbytes // 2, device=device)
        self._tensors = [normal().bfloat16() for _ in range(count)]
        self._client = storm.connect(address, embedded="never", timeout=60.0)
        offload = partial(self._client.offload, min_bytes=nbytes, budget=0.0, replay=False)
        self._offloads = {codec: offload(codec=codec) for codec in CODECS}
        self._expected: list[Tensor] = []  # back in a round that compares, the next one last
        self._prepare()

    def answer(self, order: Row) -> Row:
        """Go a way; return bytes and seconds."""
        way, offload = order["do"], self._offloads[order["codec"]]
        return {way: self._out(offload) if way == "out" else self._back()}

    def _prepare(self) -> None:
        """Copy all tensors: what somebody else holds does not leave."""
        self._loss = self._leaf
        self._copies = [tensor.clone() for tensor in self._tensors]
        synchronize(self._device)

    def _out(self, offload: storm.Offload) -> Row:
        """Save all tensors, and wait until they are stored."""
        before, session = offload.stats(), self._client._supply.sessions.of(self._device)
        assert session is not None, "the daemon does not serve this device"
        self._expected = [] if before.saved_bytes else list(self._tensors)
        with offload:
            begin = time.perf_counter()
            while self._copies:
                self._loss = _Save.apply(self._loss, self._receive, self._copies.pop(0))  # type: ignore[no-untyped-call]
        session.memory.make_room()  # what would be held for the backward pass leaves, too
        session.settle(ANSWER_SECONDS / 2)
        seconds, after = time.perf_counter() - begin, offload.stats()
        with session.connection.lock:
            assert not session.transfers.is_storing, "the daemon has not stored what it admitted"
            away = sum(one.nbytes for one in session.saved.living() if one.source is None)
        assert away, f"nothing has left the device:\n{after}"
        self._moved = {"bytes": away, "stored_bytes": after.stored_bytes - before.stored_bytes}
        return self._moved | {"seconds": seconds}

    def _back(self) -> Row:
        """Use what the last forward pass has saved."""
        begin = time.perf_counter()
        torch.autograd.backward(self._loss)
        synchronize(self._device)
        seconds = time.perf_counter() - begin
        assert not self._expected, "not all tensors came back"
        self._prepare()
        return self._moved | {"seconds": seconds}

    def _receive(self, tensor: Tensor) -> None:
        if self._expected and not torch.equal(tensor, self._expected.pop()):
            raise RuntimeError("a tensor came back changed: report this as a bug")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def child_main(kind: str, name: str, address: str, place: str) -> None:
    """Answer orders, a line each, behind a first line that tells who this is."""
    die_with_parent(signal.SIGKILL, os.getppid())
    is_cuda = name.startswith("cuda")
    try:
        device = torch.device(name if is_cuda else "cpu")
        near = near_gpus([device.index] if is_cuda else [])
        far = next((one for one in nodes() if one != near), near)
        node = prefer_node(far if place == "far" else near)
        torch.set_num_threads(1)
        if is_cuda:
            torch.cuda.set_device(device)
        work = Client(device, address) if kind == "daemon" else Copies(device)
        card = torch.cuda.get_device_name(device) if is_cuda else "cpu"
        print(json.dumps({"near": near, "node": node, "name": card}), flush=True)
        for line in sys.stdin:
            order = json.loads(line)
            time.sleep(max(0.0, order["at"] - time.monotonic()))
            print(json.dumps(work.answer(order)), flush=True)
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
        raise


def nodes() -> list[int]:
    """Return the nodes of memory that are visible and have processors."""
    found = (int(path.name.removeprefix("node")) for path in NODES.glob("node[0-9]*"))
    return sorted(one for one in found if nodes_cpus(one))


class Bench:
    """All that is measured, row by row. `end` has to follow."""

    def __init__(self, devices: list[str], seconds: float, address: str) -> None:
        self._devices, self._seconds, self._address = devices, seconds, address
        self._children: dict[str, subprocess.Popen[str]] = {}  # those that have not failed
        self._busy = 0.0  # seconds for which some child had something to do
        self.rows: list[Row] = []
        self.rates: dict[tuple[str, ...], float] = {}  # by device, measure, who else, and way

    def run(self, *, with_far: bool) -> None:
        copies = {"seconds": self._seconds}
        self._start("plain", "near")
        self._each_and_all("plain", copies)
        self._start("daemon", "near")
        for codec in CODECS:  # both at first: the daemon may be compiling
            self._warm_up({"codec": codec})
        for codec in CODECS:
            self._each_and_all(f"daemon {codec}", {"codec": codec})
        state = self._state()
        note = "" if len(nodes()) > 1 else "one node is visible: no memory is far"
        self.add("nodes", nodes=nodes(), workers=state["workers"], note=note, gpus=state["gpus"])
        if with_far and not note:
            self._start("plain", "far")
            self._each_and_all("plain, far", copies)

    def add(self, measure: str, **figures: Any) -> None:
        self.rows.append({"measure": measure} | figures)
        print(json.dumps(self.rows[-1]), flush=True)

    def _each_and_all(self, measure: str, order: Row) -> None:
        """Measure each device alone and all together, and what that takes of the daemon."""
        for group in (*([device] for device in self._devices), self._devices):
            self._busy, before = 0.0, self._used()
            self._measure(measure, group, order)
        used = {name: one - before.get(name, 0.0) for name, one in self._used().items()}
        rates = {name: round(one / max(self._busy, 1e-9), 3) for name, one in used.items()}
        self.add(f"{measure}, use", busy_seconds=self._busy, in_a_busy_second=rates)

    def _warm_up(self, order: Row) -> None:
        """Have a round compared, and go on until rounds are as later ones will be."""
        rounds, end, is_ready = 0, time.monotonic() + COMPILE_SECONDS, order["codec"] == "raw"
        while rounds < 3 or not (is_ready or time.monotonic() > end):
            rounds += 1
            answers = self._ask(self._devices, order | {"do": "out"}).values()
            found = [moved for answer in answers for moved in answer.values()]
            self._ask(self._devices, order | {"do": "back"})
            is_ready = is_ready or all(one["stored_bytes"] < 0.95 * one["bytes"] for one in found)

    def _measure(self, measure: str, group: list[str], order: Row) -> None:
        """Have children go all ways together, for some rounds, and note the medians."""
        found: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
        is_client, rounds, end = "codec" in order, 0, time.monotonic() + self._seconds
        while not rounds or (is_client and (rounds < 3 or time.monotonic() < end)):
            rounds += 1
            for way in WAYS if is_client else (*WAYS, "both"):
                for device, answer in self._ask(group, order | {"do": way}).items():
                    for direction, moved in answer.items():
                        found[device, way, direction].append(moved)
        among = "together" if group is self._devices else "alone"
        for (device, way, direction), ones in found.items():
            rates = sorted(one["bytes"] / one["seconds"] for one in ones)
            rate = self.rates[device, measure, among, way] = median(rates)
            told = {"among": among, "device": device, "way": way, "direction": direction}
            told |= {"bytes_per_second": rate, "least": rates[0], "most": rates[-1]}
            self.add(measure, **told, rounds=len(ones), last=ones[-1])

    def _ask(self, group: list[str], order: Row) -> dict[str, Row]:
        """Have children begin together; return their answers, empty where one fails."""
        there, at = [one for one in group if one in self._children], time.monotonic() + LEAD_SECONDS
        for device in there:
            with suppress(BrokenPipeError):  # it has ended, which is heard next
                print(json.dumps(order | {"at": at}), file=self._children[device].stdin, flush=True)
        end = at + order.get("seconds", 0.0) + ANSWER_SECONDS
        answers = {device: self._hear(device, end) for device in there}
        times = [moved["seconds"] for answer in answers.values() for moved in answer.values()]
        self._busy += max(times, default=0.0)
        return answers

    def _hear(self, device: str, deadline: float) -> Row:
        """Return a child's next line; nothing of one that fails, which is a row."""
        stdout: Any = self._children[device].stdout
        answer = {"error": "no answer in time"}
        if select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            answer = json.loads(stdout.readline() or '{"error": "it has ended without a word"}')
        if "error" not in answer:
            return answer
        self.add("failed", device=device, **answer)
        self.end(device)
        return {}

    def _start(self, kind: str, place: str) -> None:
        """Have a child of a kind for each device, and no others; Ctrl-C is not for them."""
        self.end()
        how: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "process_group": 0}
        for device in self._devices:
            command = [sys.executable, __file__, "--child", kind, device, self._address, place]
            self._children[device] = subprocess.Popen(command, text=True, **how)
        deadline = time.monotonic() + START_SECONDS
        for device in self._devices:
            self.add(f"child, {kind}", device=device, **self._hear(device, deadline))

    def end(self, *devices: str) -> None:
        """End the children of some devices, of all if none is named. Twice is fine."""
        for process in [self._children.pop(one) for one in devices or list(self._children)]:
            process.kill()
            with suppress(subprocess.TimeoutExpired):  # where a driver does not let go of it
                process.wait(10.0)

    def _state(self) -> Row:
        with StatusQuery(self._address, timeout=ANSWER_SECONDS) as query:
            return query.ask()

    def _used(self) -> dict[str, float]:
        """Return the processor seconds of the daemon's processes, and its operations, so far."""
        state = self._state()
        pids = {f"worker {one['index']}": one["pid"] for one in state["workers"]}
        used = {"operations": sum(flow["operations"] for flow in state["throughput"].values())}
        for name, pid in {"front": state["pid"], **pids}.items():
            with suppress(psutil.NoSuchProcess):  # one that has ended
                times = psutil.Process(pid).cpu_times()
                used[name] = times.user + times.system
        return used


def table(devices: list[str], rates: dict[tuple[str, ...], float]) -> list[str]:
    """Return a line for each device and codec, and for the sums of all; nan is unknown."""
    lines = ["GB/s of | plain out/back alone | together | daemon alone | together | share"]
    for codec, group in product(CODECS, [*([device] for device in devices), devices]):
        cells = [
            [sum(rates.get((device, *measure, way), nan) / 1e9 for device in group) for way in WAYS]
            for measure in product(("plain", f"daemon {codec}"), ("alone", "together"))
        ]
        cells.append([ours / plain for plain, ours in zip(*cells[1::2], strict=True)])
        shown = ["/".join(f"{one:.2f}" for one in cell) for cell in cells]
        lines.append(" | ".join([f"{'+'.join(group)}, {codec}", *shown]))
    return lines


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=tuple(TENSORS), default=device_here())
    parser.add_argument("--clients", type=int, help="the first devices; default: all, 2 on a CPU")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--numa", action="store_true", help="also copies to another node's memory")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child_main(*options.child)
    count = options.clients or (torch.cuda.device_count() if options.device == "cuda" else 2)
    with noted_interrupts(), ExitStack() as stack:
        flags = [f"--device={options.device}", f"--pool-bytes={6 * count}GiB", "--pool-commit=use"]
        address = os.environ.get(ADDRESS_VARIABLE)
        address = address or stack.enter_context(ChildDaemon(flags=flags)).address
        devices = [f"{options.device}:{one}" for one in range(count)]
        bench = Bench(devices, options.seconds, address)
        stack.callback(bench.end)
        try:
            bench.run(with_far=options.numa)
        except NoDaemon as error:
            bench.add("failed", error=str(error))
    print(*table(devices, bench.rates), sep="\n")
    figures = {"mps": mps_is_on(options.device), "rows": bench.rows}
    record(options.json, figures, "cupy-cuda13x", "cuda-bindings", "uvloop")
    sys.exit(any("error" in row for row in bench.rows))


if __name__ == "__main__":
    main()
