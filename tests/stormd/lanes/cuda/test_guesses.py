"""Which encoder is guessed: what tensors of one size and type have needed for a while."""

from __future__ import annotations

import numpy as np
from storm_kernels.ancf import DType
from support.cuda_bench import Bench, fill

from stormd.lanes.cuda import guesses
from stormd.lanes.cuda.guesses import SAME_BEFORE, Guesses
from stormd.ledger.events import RestoreDone, StoreDone

KIND = (1 << 20, DType.BFLOAT16)


def settle(known: Guesses, mode: str, times: int = SAME_BEFORE) -> None:
    for _ in range(times):
        known.learn(*KIND, known.likely(*KIND), mode)


def test_a_wrong_guess_is_not_repeated_and_the_next_takes_longer() -> None:
    known = Guesses()
    settle(known, "window")
    known.learn(*KIND, "fast", "raw")
    assert known.likely(*KIND) is None
    settle(known, "sparse", 2 * SAME_BEFORE - 1)
    assert known.likely(*KIND) is None
    settle(known, "sparse", 1)
    assert known.likely(*KIND) == "bitmap"
    for nbytes in range(guesses.MAX_KINDS):  # of which no more are kept
        known.learn(nbytes, DType.UINT8, None, "integer")
    assert known.likely(*KIND) is None


def test_tensors_that_differ_are_not_guessed() -> None:
    known = Guesses()
    for _ in range(4 * SAME_BEFORE):
        for mode in ("window", "sparse"):
            assert known.likely(*KIND) is None
            known.learn(*KIND, None, mode)
    for mode in ("raw", "constant"):  # which several encoders come to
        settle(known, mode, 4 * SAME_BEFORE)
        assert known.likely(*KIND) is None


def test_a_session_guesses_and_a_tensor_that_is_different_comes_back(bench: Bench) -> None:
    """It is stored raw: nobody has read its source for the encoder that it would have needed."""
    nbytes = 16 << 10
    bench.map()
    before = fill(bench)
    modes = []
    for entry in range(1, SAME_BEFORE + 4):
        if entry == SAME_BEFORE + 2:  # now of zeros mostly
            bench.memory[: nbytes // 2] = 0
            before = bench.memory.copy()
        bench.store(entry, 0, nbytes)
        bench.publish(entry)
        done = bench.expect(StoreDone, entry)
        modes.append(done.mode)
        bench.restore(100 + entry, done.block, nbytes, nbytes)
        bench.publish(100 + entry)
        bench.expect(RestoreDone, entry)
        assert np.array_equal(bench.memory[nbytes : 2 * nbytes], before[:nbytes])
    assert modes == ["window"] * (SAME_BEFORE + 1) + ["raw", "sparse"]
