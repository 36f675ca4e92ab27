"""Checks of CUDA that query the driver itself, so that no CUDA package is needed.

They create no context and take no device memory, so running trainers are not disturbed.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Final

from stormd.config import Config
from stormd.doctor.finding import Finding

__all__ = [
    "check_connections",
    "check_driver",
    "check_expandable",
    "check_ipc",
    "check_mps",
    "check_products",
    "check_workers",
]

_MIN_DRIVER: Final = 13000
"""CUDA 13.0, as cuDriverGetVersion counts."""

_UNIFIED_ADDRESSING: Final = 41
_STREAM_WAIT_GEQ: Final = 122  # CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
_VIRTUAL_MEMORY: Final = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
_DESCRIPTORS: Final = 103  # CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
_CAPABILITY: Final = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
_HOPPER: Final = (9, 0)
_NO_DRIVER: Final = "no NVIDIA driver: the cpu lane alone is offered"


def check_driver(config: Config) -> Finding:
    """Check that the driver loads, is new enough and sees a device."""
    driver = _driver()
    if driver is None:
        return _without_driver(config)
    version = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    count = _device_count(driver)
    detail = f"CUDA {version.value // 1000}.{version.value % 1000 // 10}, {count} devices"
    if version.value < _MIN_DRIVER:
        return Finding("CUDA driver", "fail", detail, "install a driver of release 580 or newer")
    if count == 0:
        return Finding("CUDA driver", "warn", detail, "check CUDA_VISIBLE_DEVICES and nvidia-smi")
    return Finding("CUDA driver", "ok", detail)


def check_ipc() -> Finding:
    """Check that every device has the features that the cuda lane needs."""
    driver = _driver()
    if driver is None:
        return Finding("CUDA IPC", "skip", _NO_DRIVER)
    lacking = _lacking(driver, _UNIFIED_ADDRESSING, _STREAM_WAIT_GEQ)
    if lacking:
        detail = f"devices {lacking} lack unified addressing or 64-bit stream waits"
        return Finding("CUDA IPC", "fail", detail, "serve with --device cpu on this machine")
    return Finding("CUDA IPC", "ok", "unified addressing and 64-bit stream waits")


def check_expandable() -> Finding:
    """Check that memory of PyTorch's expandable segments can be shared with the daemon."""
    name, driver = "expandable segments", _driver()
    if driver is None:
        return Finding(name, "skip", _NO_DRIVER)
    lacking = _lacking(driver, _VIRTUAL_MEMORY, _DESCRIPTORS)
    if lacking:
        detail = f"devices {lacking} share no such memory: it passes through staging"
        return Finding(name, "warn", detail, "train without expandable_segments:True")
    return Finding(name, "ok", "tensors in them are stored and restored in place")


def check_mps() -> Finding:
    """Check whether MPS runs: it lets the daemon's kernels run beside the trainers'."""
    if _driver() is None:
        return Finding("CUDA MPS", "skip", _NO_DRIVER)
    pipes = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))  # noqa: S108 - MPS's own default
    if (pipes / "control").exists():
        return Finding("CUDA MPS", "ok", f"control pipe in {pipes}")
    advice = "`nvidia-cuda-mps-control -d` before daemon and trainers, for kernels side by side"
    return Finding("CUDA MPS", "warn", f"not running ({pipes})", advice)


def check_workers(config: Config) -> Finding:
    """Check that several GPUs have a worker process each: one interpreter is soon saturated."""
    name, driver = "workers", _driver()
    count = 0 if driver is None or config.device == "cpu" else _device_count(driver)
    if config.workers not in ("auto", "off"):
        return Finding(name, "ok", f"{config.workers} worker processes for {count} GPUs")
    if count < 2:
        return Finding(name, "ok", "one process serves all there is")
    one = f"one process serves {count} GPUs, and is full at three to five"
    if config.workers == "off":
        return Finding(name, "warn", one, "serve with --workers auto")
    if config.resumable:
        advice = "set resumable off: what is stored can outlive no worker"
        return Finding(name, "warn", one, advice)
    return Finding(name, "ok", f"a worker process for each of {count} GPUs")


def check_connections() -> Finding:
    """Check that CUDA_DEVICE_MAX_CONNECTIONS does not put unrelated streams into one queue."""
    value = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if value == "1":
        advice = (
            "unset it, or set 8: a trainer stages its tensors, a daemon's copies wait for kernels"
        )
        return Finding("CUDA queues", "warn", "CUDA_DEVICE_MAX_CONNECTIONS=1", advice)
    return Finding("CUDA queues", "ok", f"CUDA_DEVICE_MAX_CONNECTIONS={value or 'unset'}")


def check_products() -> Finding:
    """Check whether storm_kernels.gemm has a kernel for the devices; no daemon needs one."""
    driver = _driver()
    if driver is None:
        return Finding("encoding products", "skip", _NO_DRIVER)
    others = []
    for index in range(_device_count(driver)):
        major, minor = (_attribute(driver, index, number) for number in _CAPABILITY)
        if (major, minor) != _HOPPER:
            others.append(f"{index} has {major}.{minor}")
    if others:
        detail = f"they need compute capability 9.0; device {', '.join(others)}"
        return Finding("encoding products", "skip", f"{detail}: PyTorch multiplies there")
    return Finding("encoding products", "ok", "storm_kernels.gemm encodes as it multiplies")


def _without_driver(config: Config) -> Finding:
    if config.device == "cuda":
        return Finding("CUDA driver", "fail", "libcuda.so.1 is missing", "install NVIDIA's driver")
    if Path("/dev/nvidiactl").exists():
        advice = "install the driver's libraries, or run the container with the NVIDIA runtime"
        return Finding("CUDA driver", "fail", "a device is there, libcuda.so.1 is not", advice)
    return Finding("CUDA driver", "skip", _NO_DRIVER)


def _driver() -> ctypes.CDLL | None:
    """Return the initialised driver, None if there is none that works."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return driver if driver.cuInit(0) == 0 else None


def _device_count(driver: ctypes.CDLL) -> int:
    count = ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    return count.value


def _attribute(driver: ctypes.CDLL, index: int, attribute: int) -> int:
    device, value = ctypes.c_int(), ctypes.c_int()
    driver.cuDeviceGet(ctypes.byref(device), index)
    driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
    return value.value


def _lacking(driver: ctypes.CDLL, *attributes: int) -> str:
    """Return the numbers of the devices that lack one of these attributes, joined by commas."""
    devices = range(_device_count(driver))
    have = {n for n in devices if all(_attribute(driver, n, one) for one in attributes)}
    return ", ".join(str(n) for n in devices if n not in have)
