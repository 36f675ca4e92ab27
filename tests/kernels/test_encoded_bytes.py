"""encoded_bytes.py: a mark that goes where the memory goes, and nowhere else."""

from __future__ import annotations

import gc

import torch
from storm_kernels.encoded_bytes import is_encoded, mark_encoded


def test_the_mark_is_that_of_the_memory() -> None:
    tensor = torch.zeros(64, dtype=torch.uint8)
    assert not is_encoded(tensor.untyped_storage())
    mark_encoded(tensor)
    gc.collect()
    assert is_encoded(tensor.untyped_storage())
    assert is_encoded(tensor.view(8, 8)[2:].detach().untyped_storage())
    assert not is_encoded(tensor.clone().untyped_storage())
