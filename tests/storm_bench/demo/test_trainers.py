"""Following child processes: failures and the time limit end all of them."""

from __future__ import annotations

import psutil
import pytest
from storm_bench.demo.run import Plan
from storm_bench.demo.trainers import run_trainers

from stormd.errors import ChildFailed

TINY = Plan(device="cpu", dtype="bfloat16", steps=2, layers=1, width=32, heads=2, rows=2, length=32)


@pytest.mark.parametrize(
    ("more", "seconds", "words"),
    [
        ([[*TINY.arguments(1, None), "--dtype=float8"]], 300.0, r"status 2(.|\n)*invalid choice"),
        ([], 0.2, r"longer than 0\.2 s"),
    ],
)
def test_a_failing_trainer_or_the_limit_ends_them_all_and_the_reason_is_told(
    more: list[list[str]], seconds: float, words: str
) -> None:
    before = psutil.Process().children(recursive=True)
    with pytest.raises(ChildFailed, match=words):
        run_trainers([TINY.arguments(0, None), *more], lambda *_: None, seconds)
    assert psutil.Process().children(recursive=True) == before
