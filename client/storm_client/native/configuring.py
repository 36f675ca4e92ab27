"""Gives the compiled module the Python objects that it uses."""

from __future__ import annotations

from typing import Any, Final

import torch

from storm_client.eager.operations import tunes
from storm_client.eager.settings import GETTERS, omp_threads_address, overridden_kernels
from storm_client.eager.sources import lost
from storm_client.saved.versions import changed_in_place

__all__ = ["configured"]

_is_capturing: Final = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)


def configured(follow: Any) -> Any:
    """Configure the module, which was just loaded, and return it.

    It asks Python only for settings that it cannot read itself, such as those of a later PyTorch.
    """
    read_natively = follow.native_settings()
    follow.configure(
        torch.nn.Parameter,
        changed_in_place,
        lost,
        _is_capturing,
        tuple(one for one in GETTERS if one[0].__name__ not in read_natively),
        None if tunes is bool else tunes,
        torch.library._impls,
        overridden_kernels,
        omp_threads_address(),
    )
    return follow
