"""Has a capture's fake tensors get the kernels and strides that real tensors get.

For many operations on tensors that are not contiguous, a fake tensor gets its result from a
decomposition in Python. Its values are right, but its strides not always. Views of the results are
legal only for the true strides, and sums over other strides add up in another order. So the kernel
runs on zeros, once for each operation and each layout of its arguments.

`clip_grad_norm_` runs one kernel for all gradients on a GPU, but only if PyTorch knows their type.
The norms of single gradients may have other bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch._decomp import decomposition_table
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _foreach_utils
from torch.utils import _pytree as pytree

__all__ = ["as_the_kernel_does", "lists_of_fake_tensors"]

Strides = tuple[tuple[int, ...] | None, ...]

_KNOWN: Final[dict[str, Strides | None]] = {}
"""The strides, by an operation and its arguments; None where the kernel refuses zeros."""


def as_the_kernel_does(
    function: Any, arguments: tuple[Any, ...], options: dict[str, Any], made: Any
) -> Any:
    """Return `made`, the results on fake tensors, with the strides that the kernel gives."""
    given = pytree.tree_leaves((arguments, options))
    tensors = [one for one in given if isinstance(one, FakeTensor)]
    if not _may_differ(function, tensors):
        return made
    key = f"{function} {list(map(_described, given))}"
    if key not in _KNOWN:
        _KNOWN[key] = _asked(function, arguments, options)
    strides = _KNOWN[key]
    if strides is None:
        return made
    results, tree = pytree.tree_flatten(made)
    with tensors[0].fake_mode:
        return pytree.tree_unflatten(list(map(_with, results, strides)), tree)


@contextmanager
def lists_of_fake_tensors() -> Iterator[None]:
    """Let PyTorch choose its kernels for lists of fake tensors as for those of real ones."""
    known = _foreach_utils._foreach_supported_types
    known.append(FakeTensor)
    try:
        yield
    finally:
        known.remove(FakeTensor)


def _may_differ(function: Any, tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether a decomposition decides the strides, and an argument is not contiguous."""
    if function not in decomposition_table or function._schema.is_mutable:
        return False
    if any(one.alias_info is not None for one in function._schema.returns):
        return False
    if torch.Tag.nondeterministic_seeded in function.tags:
        return False
    if not all(one.device.type in ("cpu", "cuda") for one in tensors):
        return False
    return not all(one.is_contiguous() for one in tensors)


def _described(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    return value


def _asked(function: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Strides | None:
    modes = torch.utils._python_dispatch._disable_current_modes
    with modes(), torch._C.DisableTorchFunction(), torch._C._DisableAutocast(), torch.no_grad():
        zeros, more = pytree.tree_map_only(FakeTensor, _zeros, (arguments, options))
        try:
            made = function(*zeros, **more)
        except (RuntimeError, ValueError, IndexError, NotImplementedError):
            return None
    return tuple(
        one.stride() if isinstance(one, torch.Tensor) else None for one in pytree.tree_leaves(made)
    )


def _zeros(fake: FakeTensor) -> torch.Tensor:
    reach = sum((size - 1) * stride for size, stride in zip(fake.shape, fake.stride(), strict=True))
    flat = torch.zeros(1 + max(reach, 0), dtype=fake.dtype, device=fake.device)
    return flat.as_strided(fake.shape, fake.stride())


def _with(made: Any, strides: tuple[int, ...] | None) -> Any:
    if not isinstance(made, torch.Tensor) or strides is None or made.stride() == strides:
        return made
    return torch.empty_strided(made.shape, strides, dtype=made.dtype, device=made.device)
