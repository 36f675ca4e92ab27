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
import ctypes, resource, torch
from storm_client.step.compiled import _keep_freed

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
MIB = 1 << 20
blocks = [0] * 56

def faults():
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for place in range(len(blocks)):
            blocks[place] = libc.malloc(MIB)
            libc.memset(blocks[place], 1, MIB)
        for address in blocks:
            libc.free(address)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    return after - before

torch.empty(24 * MIB, dtype=torch.uint8)
holes = [libc.malloc(MIB) for _ in range(64)]
print(faults())
_keep_freed(64 * MIB)
print(faults())
"""
"""Takes 56 MiB at the end of the heap, where glibc's limit is 48 MiB and then nearly 64 MiB.

Whatever importing has freed: it raised the limit to no more, and left holes that are filled. Only
the blocks are taken there, for a small one that is kept between them would hold them all.
"""
PAGES = 56 << 8
"""Of four KiB, that the program's blocks take."""


def test_what_was_freed_is_kept_by_the_c_library() -> None:
    if "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""):
        pytest.skip("this is how glibc does it")
    settings = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", MAPPED_AGAIN]
    done = subprocess.run(command, env=settings, check=True, stdout=subprocess.PIPE, text=True)
    before, after = map(int, done.stdout.split())
    assert before > PAGES // 2
    assert after < PAGES // 10


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
