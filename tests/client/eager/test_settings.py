"""Settings that decide bits are told apart, each of them, and are equal again when set back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import pytest
import torch
from storm_client.eager.settings import (
    DECIDING,
    GETTERS,
    KernelChoice,
    deciding_settings,
    differing_settings,
    name_of_setting,
    settings_of_kernels,
)
from storm_client.native import loader as native
from storm_client.native.build import BuildError, build
from support.thread_counts import one_thread_more
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextmanager
def having(tell: Callable[[], Any], have: Callable[[Any], object], value: Any) -> Iterator[None]:
    """Have a setting be another, and then what it was."""
    before = tell()
    have(value)
    try:
        yield
    finally:
        have(before)


def double_precision() -> AbstractContextManager[None]:
    return having(torch.get_default_dtype, torch.set_default_dtype, torch.float64)


def small_numbers_as_zero() -> AbstractContextManager[None]:
    return having(lambda: False, torch.set_flush_denormal, True)


def rounded(owner: object) -> AbstractContextManager[None]:
    before = owner.fp32_precision  # type: ignore[attr-defined]  # made when torch is loaded
    other = "ieee" if before == "tf32" else "tf32"
    return having(lambda: before, lambda one: setattr(owner, "fp32_precision", one), other)


def negated(name: str) -> AbstractContextManager[None]:
    """Have one that torch._C tells under a name be the other."""
    tell, have = getattr(torch._C, f"_get_{name}"), getattr(torch._C, f"_set_{name}")
    if isinstance(before := tell(), tuple):
        return having(tell, lambda values: have(*values), tuple(not one for one in before))
    return having(tell, have, not before)


@contextmanager
def overridden() -> Iterator[None]:
    """Have an operator of PyTorch's be computed by a function in Python."""

    def double(x: Tensor) -> Tensor:
        return x * 2

    library = torch.library.Library("aten", "IMPL")
    library.impl("silu", double, "CPU")
    try:
        yield
    finally:
        library._destroy()


OTHERS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "default dtype": double_precision,
    "deterministic": lambda: having(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
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
    "NNPACK": lambda: torch.backends.nnpack.flags(enabled=False),
    "deterministic oneDNN": lambda: negated("mkldnn_deterministic"),
    "deterministic cuDNN": lambda: negated("cudnn_deterministic"),
    "half sums on a GPU": lambda: negated("cublas_allow_fp16_reduced_precision_reduction"),
    "bfloat16 sums on a GPU": lambda: negated("cublas_allow_bf16_reduced_precision_reduction"),
    "half products on a GPU": lambda: negated("cublas_allow_fp16_accumulation"),
    "sums in attention": lambda: negated("math_sdp_allow_fp16_bf16_reduction"),
}


@pytest.mark.parametrize("is_compiled", [False, True])
def test_each_setting_counts(is_compiled: bool) -> None:
    """Compiled code tells each without Python."""
    settings: Callable[[], object] = deciding_settings
    if is_compiled:
        with suppress(BuildError):
            build()
        follow = native.module() or pytest.skip(f"no compiled module: {native.reason()}")
        settings = follow.native_settings
        assert {getter.__name__ for getter, _ in GETTERS} == set(follow.native_settings())
    before = settings()
    for name, other in OTHERS.items():
        with other():
            assert settings() != before, name
        assert settings() == before, name


NONE, PRODUCT, ATTENTION = KernelChoice


@pytest.mark.parametrize(
    ("other", "device", "counts_for"),
    [
        (OTHERS["attention"], "cuda", [ATTENTION]),
        (OTHERS["attention"], "cpu", [ATTENTION]),
        (OTHERS["order of attention"], "cuda", [ATTENTION]),
        (OTHERS["sums in attention"], "cuda", [ATTENTION]),
        (OTHERS["products on a GPU"], "cuda", [PRODUCT, ATTENTION]),
        (OTHERS["oneDNN"], "cuda", [PRODUCT, ATTENTION]),
        (OTHERS["oneDNN"], "cpu", [NONE, PRODUCT, ATTENTION]),
        (one_thread_more, "cpu", [NONE, PRODUCT, ATTENTION]),
        (one_thread_more, "cuda", []),
        (small_numbers_as_zero, "cpu", [NONE, PRODUCT, ATTENTION]),
        (small_numbers_as_zero, "cuda", []),
        (overridden, "cuda", [NONE, PRODUCT, ATTENTION]),
        (double_precision, "cuda", [NONE, PRODUCT, ATTENTION]),
    ],
)
def test_what_counts_for_kernels_is_of_their_device_and_kind(
    other: Callable[[], AbstractContextManager[object]], device: str, counts_for: list[KernelChoice]
) -> None:
    before = [settings_of_kernels(device, one) for one in KernelChoice]
    with other():
        now = [settings_of_kernels(device, one) for one in KernelChoice]
        assert [one for one in KernelChoice if now[one] != before[one]] == counts_for
    assert [settings_of_kernels(device, one) for one in KernelChoice] == before


@pytest.mark.parametrize("choice", KernelChoice)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_differs_is_named(device: str, choice: KernelChoice) -> None:
    before = settings_of_kernels(device, choice)
    assert not differing_settings(device, choice, before)
    everything = differing_settings(device, choice, tuple(object() for _ in before))
    assert len(everything) == len(before)
    for name, other in OTHERS.items():
        with other():
            differing = differing_settings(device, choice, before)
            assert bool(differing) is (settings_of_kernels(device, choice) != before), name
    with OTHERS["deterministic cuDNN"]():
        found = [name_of_setting(key) for key in differing_settings(device, choice, before)]
        assert found == ([] if choice is NONE else ["cudnn_deterministic"])


NOT_DECIDING = {
    # how PyTorch tells of things, checks, traces or allocates
    "autograd_fallback_mode", "backcompat_broadcast_warn", "backcompat_keepdim_warn",
    "check_sparse_tensor_invariants", "deterministic_fill_uninitialized_memory",
    "dtensor_allow_implicit_replication", "fake_constant", "fwd_grad_enabled",
    "generator_metaclass",
    "grad_layout_enforcement_enabled", "graph_exec_group", "graph_executor_optimize",
    "meta_in_tls_dispatch_include", "multithreading_enabled", "only_lift_cpu_tensors",
    "override_stale_capture_stream", "print_stack_traces_on_fatal_signal",
    "should_use_format_with_string_table", "skip_next_torch_function", "storage_access_error_msg",
    "storage_data_ptr_access_error_msg", "tensor_metadata",
    "thread_name", "throw_on_mutable_data_ptr", "tracing_state", "value_trace",
    "view_replay_enabled", "warnAlways", "warn_deprecated_on_mutable_data_ptr",
    "warn_on_accumulate_grad_stream_mismatch", "worker_pids", "worker_signal_handlers",
    "default_mobile_cpu_allocator",
    # a tensor's own, which its view notes
    "conj", "neg",
    # told by `get_default_dtype`; a default type is a default dtype and a default device
    "default_dtype", "default_tensor_type",
    # told by what each kind of operation is computed with, `_get_fp32_precision_getter`
    "cublas_allow_tf32", "cudnn_allow_tf32", "float32_matmul_precision", "fp32_precision_setter",
    # set around a recomputation as it was
    "cached_tensors_enabled", "dispatch_mode", "grad_enabled", "torch_function_state",
    # of functions that are never recomputed
    "linalg_preferred_backend", "qengine",
}  # fmt: skip
"""What torch._C can have be otherwise and no recomputed function depends on, or is noted else."""

ITS_OWN_NAME = {
    "sdp_use_cudnn": "cudnn_sdp_enabled",
    "sdp_use_fa3": "fa3_sdp_enabled",
    "sdp_use_fa4": "fa4_sdp_enabled",
    "sdp_use_flash": "flash_sdp_enabled",
    "sdp_use_math": "math_sdp_enabled",
    "sdp_use_mem_efficient": "mem_efficient_sdp_enabled",
    "sdp_use_overrideable": "overrideable_sdp_enabled",
}
"""What tells some of them."""


def test_all_that_pytorch_can_be_told_is_noted_or_known_to_decide_nothing() -> None:
    """A PyTorch with a new setting fails here."""
    settable = {name.removeprefix("_set_") for name in dir(torch._C) if name.startswith("_set_")}
    told = {ITS_OWN_NAME.get(name, name) for name in settable}
    assert told - NOT_DECIDING <= {name.removeprefix("_get_") for name in DECIDING}
    assert {name for name in DECIDING if name.startswith("_get_")} == set(DECIDING)


def in_a_new_thread(function: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]
