"""The demo's text and batches."""

from __future__ import annotations

import torch
from storm_bench.demo.text import Corpus, standard_library_text

CPU = torch.device("cpu")


def test_the_text_is_python() -> None:
    text = standard_library_text(1 << 16)
    assert len(text) == 1 << 16
    assert b"import " in text


def test_batches_follow_from_the_seed() -> None:
    text = standard_library_text(1 << 14)
    one, two = (Corpus(text, seed=3, device=CPU) for _ in range(2))
    for _ in range(3):
        assert torch.equal(one.batch(2, 16)[0], two.batch(2, 16)[0])


def test_targets_are_the_next_tokens() -> None:
    inputs, targets = Corpus(bytes(range(256)), seed=0, device=CPU).batch(4, 8)
    assert inputs.shape == targets.shape == (4, 8)
    assert torch.equal(targets, inputs + 1)
