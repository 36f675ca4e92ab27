"""Fixtures for all tests: above all that no test leaves anything behind.

What stays true: after each test there are as many threads, descriptors and shared-memory files
as before it, and no other signals are ignored, which all that is started later would inherit.
Things that end on their own are given until a deadline.

Threads and descriptors are a worker's own where several run tests at once. Shared memory is not: a
file that a test leaves can fail what another worker runs as well, but none can pass unseen, and
what lives no longer than a test is waited for.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

# Before torch is loaded, here and in every process that tests start: threads that share a small
# operation spend more time waiting for each other than they save, most of all on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Inductor compiles in the thread that asks: its pool of processes would outlive the test.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# The compiler is taken to know the processor, which to try takes it 6 s.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# With it products of a GPU are deterministic where `nothing_is_measured` asks for that.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# Nor does a test ask a server: TRL would tell one that it is used, from a thread of its own.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Daemons have little memory to touch as they start, where a test does not say how much: the
# 4.25 GiB of a plain one take 14 s of a processor.
os.environ.setdefault("STORMD_POOL_BYTES", "64MiB")
os.environ.setdefault("STORMD_CACHE_BYTES", "8MiB")

# Under nohup SIGHUP is ignored, and all processes that tests start would do so, too. A handler
# keeps this one from ending, and is none of theirs.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

import pytest
from hypothesis import HealthCheck, settings
from support.waiting import wait_until
from support.whole_device import gpus

# How long an example takes says how busy the machine is, not whether the code is right. `make test`
# tries few, `make test-slow` many: --hypothesis-profile=thorough.
UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("few", UNTIMED, max_examples=25)
settings.register_profile("thorough", UNTIMED, max_examples=300)
settings.load_profile("few")

with suppress(ImportError):  # frameworks and torch.compile have bars, which a thread would watch
    from tqdm import tqdm

    tqdm.monitor_interval = 0

OPEN_FILES = "/proc/self/fd"
SHARED_MEMORY = "/dev/shm"
LEAVING_SECONDS = 60.0

KINDS = ("socket:", "pipe:", "anon_inode:", "/memfd:", "/dev/shm/")
"""Descriptors that only our code opens; files are left out, which imports and logs open."""


STARTING = Path(__file__).parent / "support" / "starting"
"""What processes that tests start run first."""


def pytest_configure(config: pytest.Config) -> None:
    """Have processes that tests start run `sitecustomize.py`, workers of xdist excepted.

    And have them hear SIGINT, which a shell has its jobs in the background ignore.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if getattr(config.option, "numprocesses", None) is None:
        paths = [str(STARTING), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


LOADED = pytest.StashKey[int]()
"""How many modules were loaded when objects were last set aside."""


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Import without Python's garbage collections, and keep what is made out of later ones."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        _set_aside(session.config)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Do so with what a test has imported: PyTorch and frameworks load much when it is used."""
    try:
        return (yield)
    finally:
        if len(sys.modules) > item.config.stash[LOADED] + 20:
            _set_aside(item.config)


def _set_aside(config: pytest.Config) -> None:
    """Have later garbage collections leave out all that there is now.

    Modules stay as long as the process does, and are a million objects: to walk over them takes
    0.4 s in each test that asks for a collection, and as much now and then where much is made.
    """
    gc.collect()
    gc.freeze()
    config.stash[LOADED] = len(sys.modules)


@pytest.fixture(autouse=True)
def held_gpus(request: pytest.FixtureRequest) -> Iterator[None]:
    """Have a test that is marked so measure a GPU's memory while no other test uses it."""
    if request.node.get_closest_marker("gpu"):
        with gpus(alone=request.node.get_closest_marker("alone") is not None):
            yield
    else:
        yield


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest, held_gpus: None) -> Iterator[None]:
    """Fail a test that leaves threads, descriptors, shared memory or ignored signals behind."""
    if request.node.get_closest_marker("gpu"):
        _open_cuda()
    threads, descriptors, files = _threads(), _descriptors(), _shared_files()
    ignored = _ignored_signals()
    yield
    assert not (_ignored_signals() - ignored)
    wait_until(lambda: not (_threads() - threads), LEAVING_SECONDS, lambda: _threads() - threads)
    wait_until(
        lambda: not (_descriptors() - descriptors),
        LEAVING_SECONDS,
        lambda: _descriptors() - descriptors,
    )
    wait_until(
        lambda: not (_shared_files() - files),
        LEAVING_SECONDS,
        lambda: _shared_files() - files,
    )


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory for sockets: pytest's own paths are too long."""
    with tempfile.TemporaryDirectory(prefix="storm-") as directory:
        yield Path(directory)


@pytest.fixture(autouse=True)
def nothing_is_compiled() -> Iterator[None]:
    """Have PyTorch forget what a test has compiled: nothing is recomputed where that may run."""
    yield
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and sys.modules["torch._dynamo.eval_frame"].cached_backends:
        dynamo.reset()


@pytest.fixture
def nothing_is_measured(request: pytest.FixtureRequest) -> Iterator[None]:
    """Have Inductor choose kernels for a GPU without measuring them: others add in another order.

    That takes PyTorch's own setting, which is the process's. Dynamo sets Inductor's by it with
    every function that it compiles.
    """
    if not request.node.get_closest_marker("gpu"):
        yield
        return
    import torch

    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    yield
    torch.utils.deterministic.fill_uninitialized_memory = before
    torch.use_deterministic_algorithms(mode=False)


@cache
def _open_cuda() -> None:
    """Have the driver open the descriptors that it keeps for the life of the process.

    And have the codec's kernels compiled: a thread that waits for them would outlive its test.
    """
    import torch

    if torch.cuda.is_available():
        subprocess.run([sys.executable, "-m", "storm_kernels.ancf.compile"], check=True)
        for ordinal in range(torch.cuda.device_count()):
            torch.ones(8, device=f"cuda:{ordinal}", requires_grad=True).square().sum().backward()
            torch.cuda.synchronize(ordinal)


def _ignored_signals() -> set[int]:
    return {one for one in signal.valid_signals() if signal.getsignal(one) is signal.SIG_IGN}


def _threads() -> set[str]:
    """Return Python's own threads; one of autograd's has a dummy once it has run Python code."""
    return {
        f"{thread.name} ({thread.ident})"
        for thread in threading.enumerate()
        if not isinstance(thread, threading._DummyThread)
    }


def _descriptors() -> Counter[str]:
    """Return how many descriptors of each kind are open, with memfds under their names.

    Paths as objects would take as long as half of all that is done for a small test.
    """
    kinds: Counter[str] = Counter()
    for entry in os.listdir(OPEN_FILES):  # noqa: PTH208
        try:
            target = os.readlink(f"{OPEN_FILES}/{entry}")  # noqa: PTH115
        except OSError:
            continue  # the descriptor of the listing itself
        if target.startswith(KINDS):
            kinds[target.partition(":[")[0]] += 1
    return kinds


def _shared_files() -> set[str]:
    with suppress(FileNotFoundError):
        return set(os.listdir(SHARED_MEMORY))  # noqa: PTH208
    return set()
