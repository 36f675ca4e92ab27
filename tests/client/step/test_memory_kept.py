"""A step's memory is not given back to the system between steps, only to be mapped again."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import storm_client as storm
import torch
from storm_client.step import compiled
from support.compiled_programs import perceptron
from support.steps import step_of
from support.training import seeded

MAPPED_AGAIN = """
import resource, torch
from storm_client.step.compiled import _keep_freed

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(100 << 10, dtype=torch.uint8) for _ in range(80)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def settled():
    return [faults() for _ in range(3)][-1]

print(settled())
_keep_freed(16 << 20)
print(settled())
"""
PAGES = 80 * 100 // 4
"""Of four KiB, that the program's blocks take."""


PROCESSES = 40
"""In most of them importing has freed a block so large that glibc keeps all of this anyway."""


@pytest.mark.slow
def test_what_was_freed_is_kept_by_the_c_library() -> None:
    if "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""):
        pytest.skip("this is how glibc does it")
    settings = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    for _ in range(PROCESSES):
        command = [sys.executable, "-c", MAPPED_AGAIN]
        done = subprocess.run(command, env=settings, check=True, stdout=subprocess.PIPE, text=True)
        before, after = map(int, done.stdout.split())
        assert after < PAGES // 10
        if before > PAGES // 2:
            return
    pytest.fail(f"in none of {PROCESSES} processes was memory given back and mapped again")


def test_a_step_keeps_what_its_temporaries_take_at_once(
    client: storm.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(compiled, "_keep_freed", asked.append)
    net = perceptron("cpu")
    step = step_of(net, torch.optim.SGD(net.parameters(), lr=0.1))
    call = storm.compile_step(step, client=client, codegen="eager")
    call(seeded("cpu", 64, 32))
    assert asked == [call.explain().layout.bound]
