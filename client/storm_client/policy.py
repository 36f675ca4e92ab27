"""Which saved tensors stay where they are, and why. Pure: it looks, and changes nothing.

What stays true: a tensor that passes is a plain strided tensor whose bytes are its storage's
bytes, in memory that is PyTorch's alone. Whatever is doubtful is passed over, which costs memory
and never a value.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from storm_client.sharing import is_foreign

__all__ = ["Policy"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Exact types; a subclass may mean anything by its bytes."""

_QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
"""Also of tensors that are not quantized: bytes viewed as one of these."""

_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


class Policy:
    """The choice of one Offload."""

    def __init__(self, modules: Iterable[torch.nn.Module], min_bytes: int) -> None:
        """Pass over the parameters and buffers of `modules` and what is below `min_bytes`."""
        self.min_bytes = min_bytes
        self.modules = tuple(modules)
        self._owned: dict[int, weakref.ref[torch.Tensor]] = {}
        """One of those that lie in a storage, by the storage's address."""

    def refresh(self) -> None:
        """Look up the modules' storages anew: moving a module gives its parameters new ones."""
        owned = {}
        for tensor in self._tensors():
            if type(tensor) in _PLAIN and tensor.layout is torch.strided:
                owned[tensor.untyped_storage()._cdata] = weakref.ref(tensor)
        self._owned = owned

    def reason(self, tensor: torch.Tensor) -> str | None:
        """Return why `tensor` stays with autograd, None where it may be offloaded.

        Called for every saved tensor: what most of them are is looked at first. What is small may
        be a view of a large storage, which it keeps.
        """
        if type(tensor) not in _PLAIN or _is_wrapped(tensor):
            return "subclass"
        if tensor.layout is not torch.strided or tensor.is_nested:
            return _layout(tensor)
        nbytes = tensor.nbytes
        if not nbytes or (nbytes < self.min_bytes and not tensor._is_view()):
            return "small"
        if not (tensor.is_cuda or tensor.is_cpu):
            return "meta" if tensor.is_meta else "device"
        return self._less_common(tensor)

    def storage_reason(self, storage: torch.UntypedStorage) -> str | None:
        """Return why a storage that a tensor passed with stays, None where it may be offloaded."""
        if storage.nbytes() < self.min_bytes:
            return "small"
        return "foreign" if is_foreign(storage) else None

    def _less_common(self, tensor: torch.Tensor) -> str | None:
        """Go on for a plain tensor that is large enough."""
        if tensor._is_zerotensor():
            return "zero"  # as forward-mode differentiation makes them, without any memory
        if type(tensor) is torch.nn.Parameter or self._is_owned(tensor):
            return "parameter"
        if tensor.requires_grad and tensor.grad_fn is None:
            return "leaf"  # the graph itself holds it, to accumulate its gradient
        if tensor.is_quantized or tensor.dtype in _QUANTIZED:
            return "quantized"
        return "inference" if tensor.is_inference() else None

    def _is_owned(self, tensor: torch.Tensor) -> bool:
        """Tell whether it is, or views, a parameter or buffer of the modules."""
        address = tensor.untyped_storage()._cdata
        reference = self._owned.get(address)
        owner = None if reference is None else reference()
        if owner is not None and owner.untyped_storage()._cdata == address:
            return True  # and no storage has come to the address of one that is gone
        return tensor._is_view() and isinstance(tensor._base, torch.nn.Parameter)

    def _tensors(self) -> Iterable[torch.Tensor]:
        for module in self.modules:
            yield from module.parameters()
            yield from module.buffers()


def _layout(tensor: torch.Tensor) -> str:
    """Name the layout of a tensor that is not plainly strided."""
    if tensor.is_nested:
        return "nested"
    return "sparse" if "sparse" in str(tensor.layout) else "layout"
