"""Settings that decide bits are told apart, each of them, and are equal again when set back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from storm_client.settings import deciding_settings, settings_of_kernels
from support.thread_counts import one_thread_more
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextmanager
def double_precision() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def rounded(owner: object) -> Iterator[None]:
    before = owner.fp32_precision  # type: ignore[attr-defined]  # made when torch is loaded
    owner.fp32_precision = "ieee" if before == "tf32" else "tf32"  # type: ignore[attr-defined]
    try:
        yield
    finally:
        owner.fp32_precision = before  # type: ignore[attr-defined]


OTHERS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "default dtype": double_precision,
    "deterministic": deterministic,
    "attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "order of attention": lambda: sdpa_kernel(
        [
            SDPBackend.MATH,
            SDPBackend.FLASH_ATTENTION,
            SDPBackend.EFFICIENT_ATTENTION,
            SDPBackend.CUDNN_ATTENTION,
        ],
        set_priority=True,
    ),
    "oneDNN": lambda: torch.backends.mkldnn.flags(enabled=False),
    "cuDNN": lambda: torch.backends.cudnn.flags(enabled=False),
    "cuDNN measures": lambda: torch.backends.cudnn.flags(enabled=True, benchmark=True),
    "products on a GPU": lambda: rounded(torch.backends.cuda.matmul),
    "convolutions on a GPU": lambda: rounded(torch.backends.cudnn.conv),
    "recurrent layers on a GPU": lambda: rounded(torch.backends.cudnn.rnn),
    "products on a CPU": lambda: rounded(torch.backends.mkldnn.matmul),
    "convolutions on a CPU": lambda: rounded(torch.backends.mkldnn.conv),
}


@pytest.mark.parametrize("name", OTHERS)
def test_each_setting_counts(name: str) -> None:
    before = deciding_settings()
    assert deciding_settings() == before
    with OTHERS[name]():
        assert deciding_settings() != before
    assert deciding_settings() == before


@pytest.mark.parametrize(
    ("other", "device", "is_simple", "counts"),
    [
        (OTHERS["attention"], "cpu", False, True),
        (OTHERS["attention"], "cuda", False, True),
        (OTHERS["attention"], "cpu", True, False),
        (OTHERS["attention"], "cuda", True, False),
        (OTHERS["oneDNN"], "cpu", True, True),
        (OTHERS["oneDNN"], "cuda", True, False),
        (one_thread_more, "cpu", False, True),
        (one_thread_more, "cpu", True, True),
        (one_thread_more, "cuda", False, False),
    ],
)
def test_what_counts_for_kernels_is_of_their_device(
    other: Callable[[], AbstractContextManager[object]], device: str, is_simple: bool, counts: bool
) -> None:
    before = settings_of_kernels(device, is_simple=is_simple)
    with other():
        assert (settings_of_kernels(device, is_simple=is_simple) != before) is counts
    assert settings_of_kernels(device, is_simple=is_simple) == before
