"""Step time against peak memory of one training step, by method of keeping activations.

    python tests/bench/train.py --workloads W1 W2 W3 --json tests/bench/results/train.json

Each method runs in a process of its own, so that no allocator remembers another; ours talks to a
daemon that this script starts and ends. A step is forward and backward without an optimizer,
gradients dropped; the median of 4 after 2 warm-ups. `peak_gib` is PyTorch's maximum of allocated
bytes; memory that is not PyTorch's (our staging area, the daemon) is reported beside it.

The last tensors of a step, the head's and the loss's, are needed at once in the backward: all
offloading methods leave them where they are.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from gpt import WORKLOADS, Gpt, attention, make
from torch import Tensor
from torch.utils.checkpoint import checkpoint

WARM_UPS, STEPS = 2, 4
MIN_BYTES = 1 << 20
GIB = 1 << 30
CHILD_SECONDS = 180

Context = Callable[[], AbstractContextManager[object]]
OURS = ("storm", "storm-raw", "storm-checkpoint")
METHODS = ("none", "checkpoint", "save-on-cpu", "trl", "torchtune", *OURS)


def forward(model: Gpt, tokens: Tensor, context: Context, recompute: bool) -> Tensor:
    x = model.embed(tokens)
    with context():
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
    return x


def seconds_of_a_step(step: Callable[[], object], device: torch.device) -> float:
    _synchronize(device)
    begin = time.perf_counter()
    step()
    _synchronize(device)
    return time.perf_counter() - begin


def measure(workload: str, method: str, address: str, device: torch.device) -> dict[str, Any]:
    """Return the figures of one method in this process."""
    model, tokens, targets = make(WORKLOADS[workload], device)
    recompute = method in ("checkpoint", "storm-checkpoint")
    with _context_of(method, model, address) as (context, report), attention(device):

        def step() -> None:
            model.loss(forward(model, tokens, context, recompute), targets).backward()
            model.zero_grad(set_to_none=True)

        for _ in range(WARM_UPS):
            step()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        times = [1e3 * seconds_of_a_step(step, device) for _ in range(STEPS)]
        figures = {
            "step_ms": round(statistics.median(times), 1),
            "times_ms": [round(time, 1) for time in times],
        }
        if device.type == "cuda":
            figures["peak_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 2)
            free, total = torch.cuda.mem_get_info()
            figures["device_used_gib"] = round((total - free) / GIB, 2)
        return figures | report()


@contextmanager
def _context_of(
    method: str, model: Gpt, address: str
) -> Iterator[tuple[Context, Callable[[], dict[str, Any]]]]:
    if method in OURS:
        with _ours(method, model, address) as found:
            yield found
        return
    contexts: dict[str, Callable[[Gpt], Context]] = {
        "none": lambda _: nullcontext,
        "checkpoint": lambda _: nullcontext,
        "save-on-cpu": lambda _: lambda: torch.autograd.graph.save_on_cpu(pin_memory=True),
        "trl": _trl,
        "torchtune": _torchtune,
    }
    yield contexts[method](model), dict


@contextmanager
def _ours(
    method: str, model: Gpt, address: str
) -> Iterator[tuple[Context, Callable[[], dict[str, Any]]]]:
    import storm_client as storm

    with storm.connect(address, embedded="never", timeout=30.0) as client:
        codec = "raw" if method == "storm-raw" else "ancf"
        offload = client.offload(model, min_bytes=MIN_BYTES, codec=codec)

        def report() -> dict[str, Any]:
            stats, status = offload.stats(), client.status()
            steps = WARM_UPS + STEPS
            return {
                "offloaded_gib_a_step": round(stats.offloaded_bytes / steps / GIB, 3),
                "ratio": round(stats.ratio, 3),
                "store_ms_a_step": round(1e3 * stats.store_seconds / steps, 1),
                "restore_wait_ms_a_step": round(1e3 * stats.restore_wait_seconds / steps, 1),
                "kept": dict(stats.kept),
                "stored_by_mode": dict(stats.stored_by_mode),
                "pool_peak_gib": round(status.details["pool"]["peak_used_bytes"] / GIB, 3),
            }

        yield (lambda: offload), report


def _trl(model: Gpt) -> Context:
    from trl.models.activation_offloading import OffloadActivations

    context = OffloadActivations(min_offload_size=MIN_BYTES)
    context.update_model_params(model)
    return lambda: context


def _torchtune(_model: Gpt) -> Context:
    from torchtune.training import OffloadActivations

    context = OffloadActivations(min_offload_size=MIN_BYTES)
    return lambda: context


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# --- the parent -----------------------------------------------------------------------------


def compile_codec() -> None:
    """Have the codec's kernels in the cache on disk: until then a daemon would store raw."""
    code = (
        "from storm_kernels.ancf.cuda import CudaCodec; from storm_kernels.ancf import DType; "
        "CudaCodec().prepare(DType.BFLOAT16)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@contextmanager
def daemon(device: torch.device, pool: str, flags: list[str]) -> Iterator[str]:
    """Run a daemon with a pool of that size and these flags; yield its address."""
    with tempfile.TemporaryDirectory(prefix="stormd-bench-") as directory:
        address = f"ipc://{directory}/stormd.sock"
        log = Path(directory, "log")
        command = [sys.executable, "-m", "stormd.cli", "serve", "--address", address]
        command += ["--device", device.type, "--pool-bytes", pool, *flags]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            _await(process, address, log)
            yield address
        finally:
            process.terminate()
            process.wait(30)
            print(log.read_text()[-2000:], file=sys.stderr)


def _await(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    ask = [sys.executable, "-m", "stormd.cli", "status", "--address", address, "--json"]
    deadline = time.monotonic() + 120
    while subprocess.run(ask, capture_output=True, check=False).returncode:
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the daemon did not start:\n{log.read_text()}")


def run_child(workload: str, method: str, address: str) -> dict[str, Any]:
    """Return the figures of one method, measured in a new process; "skipped" says why not."""
    command = [sys.executable, __file__, "--child", workload, method, address]
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=CHILD_SECONDS)
    except subprocess.TimeoutExpired:
        return {"skipped": f"not done after {CHILD_SECONDS} s"}
    if done.returncode:
        return {"skipped": done.stderr.decode()[-600:].strip()}
    figures: dict[str, Any] = json.loads(done.stdout.decode().splitlines()[-1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workloads", nargs="+", default=["W1"], choices=list(WORKLOADS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--pool", default="32GiB", help="the daemon's pool")
    parser.add_argument(
        "--flag", action="append", default=[], help="a flag more for the daemon: --flag=--x=y"
    )
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--png", type=Path, help="where step time against peak memory is drawn")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.child:
        print(json.dumps(measure(*options.child, device)))
        return
    results = {"machine": describe(device), "command": sys.argv, "workloads": {}}
    if device.type == "cuda":
        compile_codec()
    with daemon(device, options.pool, options.flag) as address:
        for workload in options.workloads:
            rows = results["workloads"][workload] = {}
            for method in options.methods:
                rows[method] = run_child(workload, method, address)
                print(f"{workload} {method:18} {json.dumps(rows[method])[:400]}", flush=True)
                if options.json:
                    options.json.write_text(json.dumps(results, indent=1) + "\n")
    if options.png:
        draw(results, options.png)


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw each workload's methods by peak memory and step time."""
    from matplotlib import pyplot

    workloads = results["workloads"]
    figure, plots = pyplot.subplots(1, len(workloads), figsize=(5 * len(workloads), 4))
    for plot, (workload, rows) in zip(
        [plots] if len(workloads) == 1 else plots, workloads.items(), strict=True
    ):
        for method, row in rows.items():
            if "peak_gib" in row:
                plot.scatter(row["peak_gib"], row["step_ms"])
                plot.annotate(method, (row["peak_gib"], row["step_ms"]))
        plot.set(title=workload, xlabel="peak GiB of PyTorch", ylabel="ms a step")
        plot.set_xlim(left=0)
        plot.set_ylim(bottom=0)
    figure.suptitle(f"{results['machine']['device']}, {results['machine']['date']}")
    figure.tight_layout()
    figure.savefig(path)


def describe(device: torch.device) -> dict[str, Any]:
    """Return what the figures were measured on."""
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    return {
        "device": name,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "date": time.strftime("%Y-%m-%d"),
    }


if __name__ == "__main__":
    main()
