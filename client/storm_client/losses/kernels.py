"""Which kernels of storm_kernels.loss have the same bits as the installed PyTorch, on a GPU.

The backward pass is elementwise, given a row's largest logit and the logarithm of its sum, however
these were computed. The forward pass adds in the order of a certain version of PyTorch. Either
kernel is used once it had every bit of PyTorch's own operations on a tile of such logits, in this
process.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import torch
from storm_kernels.errors import BackendUnavailable
from storm_kernels.loss import cuda
from torch import Tensor

__all__ = ["NO_KERNELS", "Kernels", "have_same_bits", "kernels_for", "statistics_of"]

PROOF_BYTES: Final = 32 << 20
"""Most bytes for the log-probabilities of compared logits, unless 16 rows need more."""

MIN_ROWS, MAX_ROWS = 16, 64


class Kernels(NamedTuple):
    """Which kernels may be used."""

    forward: bool
    backward: bool


NO_KERNELS: Final = Kernels(forward=False, backward=False)

_proved: dict[tuple[torch.device, torch.dtype, int, int], Kernels] = {}
"""By device, type, number of classes, and offset of the first row from a multiple of 16 bytes."""


def kernels_for(logits: Tensor, dtype: torch.dtype) -> Kernels:
    """Return the kernels for logits (N, C) whose log-probabilities are of type `dtype`.

    The first use of a kernel compiles it, and waits for the device to compare the results.
    """
    if not logits.is_cuda or dtype != torch.float32 or logits.dtype == torch.float64:
        return NO_KERNELS
    if logits.shape[1] <= cuda.MIN_CLASSES or not logits.is_contiguous():
        return NO_KERNELS
    if not cuda.fits(logits):
        return NO_KERNELS
    offset = logits.data_ptr() % 16 // logits.element_size()
    key = (logits.device, logits.dtype, logits.shape[1], offset)
    if key not in _proved:
        if torch.cuda.is_current_stream_capturing():
            return NO_KERNELS
        _proved[key] = _prove(*key)
    return _proved[key]


def statistics_of(logits: Tensor, log_probs: Tensor) -> cuda.Statistics:
    """Return each row's largest logit, and the logarithm of its sum of exponentials relative to it.

    A row's largest log-probability is (largest - largest) - logarithm, which is exact.
    """
    return cuda.Statistics(logits.amax(1).float(), log_probs.amax(1).neg())


def _prove(device: torch.device, dtype: torch.dtype, classes: int, offset: int) -> Kernels:
    try:
        cuda.prepare(device, dtype)
    except BackendUnavailable:
        return NO_KERNELS
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        return _compared(*_samples(device, dtype, classes, offset))


def _samples(
    device: torch.device, dtype: torch.dtype, classes: int, offset: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, classes and gradients whose results reveal the order in which rows are added.

    In half of the rows the sum is about 2, where its last bit shows in its logarithm.
    """
    rows = max(MIN_ROWS, min(MAX_ROWS, PROOF_BYTES // (4 * classes)))
    random = torch.Generator(device).manual_seed(0)
    memory = torch.empty(rows * classes + offset, dtype=dtype, device=device)
    logits = memory[offset:].view(rows, classes)
    numbers = torch.randn(logits.shape, generator=random, device=device)
    numbers[::2].mul_(3)
    numbers[1::2].mul_(0.5).sub_(math.log(classes))
    index = torch.randint(classes, (rows,), generator=random, device=device)
    numbers[1::2, classes // 3] = 0.0
    numbers[2, classes // 2] = math.inf
    numbers[4, classes // 2] = math.nan
    numbers[6, :-1] = -math.inf
    numbers[8] = -math.inf
    numbers[10:14:2].mul_(9)  # gradients so small that they lose bits
    logits.copy_(numbers)
    gradients = torch.randn(rows, generator=random, device=device)
    gradients[::5] = 0.0
    gradients[3::5] = -0.0
    return logits, index, gradients


def _compared(logits: Tensor, index: Tensor, gradients: Tensor) -> Kernels:
    """Compare both kernels with PyTorch's operations; return those with the same bits."""
    log_probs = torch.log_softmax(logits.float(), 1)
    spread = torch.zeros_like(log_probs).scatter_(1, index.unsqueeze(1), gradients.unsqueeze(1))
    expected = torch._log_softmax_backward_data(spread, log_probs, 1, torch.float32)
    expected, picked = expected.to(logits.dtype), log_probs.gather(1, index.unsqueeze(1)).squeeze(1)
    theirs = statistics_of(logits, log_probs)
    del spread, log_probs
    found = torch.empty_like(logits)
    cuda.backward(logits, index, gradients, theirs, found)
    if not have_same_bits(found, expected):
        return NO_KERNELS
    ours = cuda.Statistics(*map(torch.empty_like, theirs))
    ours_picked = torch.empty_like(picked)
    cuda.forward(logits, index, ours_picked, ours)
    cuda.backward(logits, index, gradients, ours, found)
    finite = logits.isfinite().all(1)
    forward = (
        have_same_bits(ours_picked, picked)
        and have_same_bits(found, expected)
        and torch.equal(ours.largest[finite], theirs.largest[finite])
        and torch.equal(ours.log_total[finite], theirs.log_total[finite])
    )
    return Kernels(forward, backward=True)


def have_same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same bits; a NaN equals any other NaN."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    word = _WORDS[one.element_size()]
    one, other = one.reshape(-1), other.reshape(-1)
    for begin in range(0, one.numel(), _COMPARED):
        a, b = one[begin : begin + _COMPARED], other[begin : begin + _COMPARED]
        if not ((a.view(word) == b.view(word)) | (a.isnan() & b.isnan())).all():
            return False
    return True


_COMPARED: Final = 1 << 24
"""Elements compared at a time; the comparison takes a few times as many bytes."""

_WORDS: Final = {2: torch.int16, 4: torch.int32, 8: torch.int64}
