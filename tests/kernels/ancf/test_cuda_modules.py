"""A module is compiled once, whoever asks, and what cannot be compiled is an error each time."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import pytest
from storm_kernels.ancf import DType, cuda_modules
from storm_kernels.ancf.cuda_launches import PIPELINES
from storm_kernels.ancf.cuda_modules import Modules, Wanted, wanted
from storm_kernels.errors import BackendUnavailable

THREADS = 6


class Compiler:
    """Stands in for CuPy: counts what it is given, and is as slow as `gate` says."""

    def __init__(self) -> None:
        self.asked: Counter[Wanted] = Counter()
        self.gate = threading.Event()
        self.broken = False

    def __call__(self, which: Wanted, _device: int) -> object:
        self.asked[which] += 1
        self.gate.wait(60)
        if self.broken:
            raise BackendUnavailable("no compiler today")
        return which


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    compiler = Compiler()
    monkeypatch.setattr(cuda_modules, "_compiled", compiler)
    return compiler


def all_at_once(modules: Modules, which: Wanted, compiler: Compiler) -> list[object]:
    """Return what threads get, or are told, that ask for a module before it is compiled."""
    found: list[object] = []

    def get() -> None:
        try:
            found.append(modules.get(which))
        except BackendUnavailable as error:
            found.append(str(error))

    threads = [threading.Thread(target=get) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    compiler.gate.set()
    for thread in threads:
        thread.join()
    return found


def test_threads_that_ask_for_one_module_share_it(compiler: Compiler) -> None:
    which = wanted("ancf_encode_fast", DType.BFLOAT16)
    assert all_at_once(Modules(0), which, compiler) == [which] * THREADS
    assert compiler.asked == {which: 1}


def test_all_are_told_why_and_the_next_to_ask_tries_again(compiler: Compiler) -> None:
    modules, which = Modules(0), wanted("ancf_choose", DType.FLOAT32)
    compiler.broken = True
    assert set(all_at_once(modules, which, compiler)) == {"no compiler today"}
    compiler.broken = False
    assert modules.get(which) == which


def test_what_is_prepared_is_compiled_side_by_side_and_not_again(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_modules, "_processors", lambda: 2)
    modules = Modules(0)
    parts = [wanted(f"ancf_decode_{pipeline}", DType.BYTES) for pipeline in PIPELINES]
    compiler.gate.set()
    modules.prepare([*parts, *parts])
    assert [modules.get(which) for which in parts] == parts
    assert compiler.asked == dict.fromkeys(parts, 1)


def test_processes_with_one_cache_take_turns_at_a_module_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("CUPY_CACHE_DIR", str(cache))
    which, other = (wanted("ancf_choose", dtype) for dtype in (DType.FLOAT32, DType.BFLOAT16))
    entered = threading.Event()

    def compile_it() -> None:
        with cuda_modules._turn(which):
            entered.set()

    with cuda_modules._turn(which):
        with cuda_modules._turn(other):
            assert len(list(cache.iterdir())) == 2
        thread = threading.Thread(target=compile_it)
        thread.start()
        assert not entered.wait(0.3)
    thread.join(30)
    assert entered.is_set()
    monkeypatch.setattr(cuda_modules, "TURN_SECONDS", 0.05)
    with cuda_modules._turn(which), cuda_modules._turn(which):
        monkeypatch.setenv("CUPY_CACHE_DIR", "/dev/null/cache")  # where no folder can be
    with cuda_modules._turn(which):
        pass
