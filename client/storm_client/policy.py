"""Which saved tensors may be offloaded at all, and why the others stay. It changes nothing.

A tensor that may is a plain strided tensor whose bytes are its storage's bytes, in memory that is
PyTorch's alone. Whatever is doubtful stays, which costs memory and never a value.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, Final, Protocol

import torch

from storm_client.monitoring.layers import parts_of
from storm_client.planner import OFFLOAD, Decision, Keep
from storm_client.saved.distributed import part_of
from storm_client.saved.snapshots import base_of

if TYPE_CHECKING:
    from storm_client.native import Native, _follow

__all__ = ["Inside", "Policy"]

LOOK_EVERY: Final = 64
"""One in so many looks for the modules' storages is for those that are new, too."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Exact types; a subclass may mean anything by its bytes."""

_QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
"""Also of tensors that are not quantized: bytes viewed as one of these."""

_SMALL, _PARAMETER, _OUTSIDE = Keep("small"), Keep("parameter"), Keep("outside")
_FOREIGN, _SUBCLASS = Keep("foreign"), Keep("subclass")

_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


class Inside(Protocol):
    """Tells whether the calling thread is inside one of certain layers."""

    depth: int


class Policy:
    """The choice of one Offload."""

    def __init__(self, modules: Iterable[torch.nn.Module], min_bytes: int) -> None:
        """Pass over the parameters and buffers of `modules` and what is below `min_bytes`."""
        self.min_bytes = min_bytes
        self.modules = tuple(modules)
        self.layers: Inside | None = None
        """Set where only what is saved inside certain layers may leave."""
        self._owned: dict[int, weakref.ref[torch.Tensor]] = {}
        """One of those that lie in a storage, by the storage's address."""
        self._native: _follow.Owned | None = None
        """The same for compiled code."""
        self._may_be_stale = True
        self._looks = -1

    def refresh(self) -> None:
        """Have the modules' storages looked up anew before something is not found among them.

        Moving a module gives its parameters new ones. To look through a model's modules takes up to
        a millisecond, and what most steps save needs no such look.
        """
        self._may_be_stale = True

    def _look_up(self) -> None:
        self._may_be_stale = False
        self._looks += 1
        if self._looks % LOOK_EVERY and all(map(self._is_known, self._owned)):
            return  # nothing has moved; what is new stays anyway, since somebody else holds it
        owned: dict[int, weakref.ref[torch.Tensor]] = {}
        for part in parts_of(self.modules):
            for table in (part._parameters, part._buffers):
                for tensor in table.values() if table else ():
                    if tensor is None or type(local := part_of(tensor)) not in _PLAIN:
                        continue
                    if local.layout is torch.strided:
                        owned[local.untyped_storage()._cdata] = weakref.ref(local)
        self._owned, self._native = owned, None

    def owned(self, follow: Native) -> _follow.Owned:
        """Return the modules' storages for compiled code, as they were when last looked up."""
        if self._native is None:
            if not self._owned:
                self._look_up()
            living = (reference() for reference in self._owned.values())
            self._native = follow.Owned([one for one in living if one is not None])
        return self._native

    def small_owned_bytes(self) -> int:
        """Return the bytes of the modules' parameters that are passed over as small."""
        parameters = chain.from_iterable(module.parameters() for module in self.modules)
        return sum(one.nbytes for one in parameters if one.nbytes < self.min_bytes)

    def decide(self, tensor: torch.Tensor, least: int | None = None) -> Decision:
        """Return what becomes of `tensor`, as far as it and its storage tell.

        What has less than `least` bytes stays; None stands for `min_bytes`. Called for every saved
        tensor: what most of them are is looked at first. What is small may be a view of a large
        storage, which it keeps.
        """
        least = self.min_bytes if least is None else least
        if type(tensor) not in _PLAIN or _is_wrapped(tensor):
            return _PARAMETER if isinstance(base_of(tensor), torch.nn.Parameter) else _SUBCLASS
        if tensor.layout is not torch.strided or tensor.is_nested:
            return Keep(_layout(tensor))
        nbytes = tensor.nbytes
        if not nbytes or (nbytes < least and not tensor._is_view()):
            return _SMALL
        if not (tensor.is_cuda or tensor.is_cpu):
            return Keep("meta" if tensor.is_meta else "device")
        if self.layers is not None and not self.layers.depth:
            return _OUTSIDE
        return self._decide_further(tensor, least)

    def decide_storage(self, storage: torch.UntypedStorage, least: int | None = None) -> Decision:
        """Return what becomes of a storage of which a tensor may be offloaded; see `decide`."""
        if storage.nbytes() < (self.min_bytes if least is None else least):
            return _SMALL
        return _FOREIGN if _is_foreign(storage) else OFFLOAD

    def _decide_further(self, tensor: torch.Tensor, least: int) -> Decision:
        """Go on for a plain tensor that is large enough."""
        if tensor._is_zerotensor():
            return Keep("zero")  # as forward-mode differentiation makes them, without any memory
        storage = tensor.untyped_storage()
        if type(tensor) is torch.nn.Parameter or self._is_owned(tensor, storage._cdata):
            return _PARAMETER
        if tensor.requires_grad and base_of(tensor).is_leaf and tensor.grad_fn is None:
            return Keep("leaf")  # the graph itself holds it, to accumulate its gradient
        if tensor.is_quantized or tensor.dtype in _QUANTIZED:
            return Keep("quantized")
        return Keep("inference") if tensor.is_inference() else self.decide_storage(storage, least)

    def _is_owned(self, tensor: torch.Tensor, address: int) -> bool:
        """Tell whether it is, or views, a parameter or buffer of the modules.

        No result of an operation is one, but for a view.
        """
        if self._is_known(address):
            return True
        base = tensor._base
        if isinstance(base, torch.nn.Parameter):
            return True
        if not self._may_be_stale or (tensor if base is None else base).grad_fn is not None:
            return False
        self._look_up()
        return self._is_known(address)

    def _is_known(self, address: int) -> bool:
        """Tell whether a storage is that of one that was found at the last look."""
        reference = self._owned.get(address)
        owner = None if reference is None else reference()
        # No storage may have come to the address of one that is gone.
        return owner is not None and owner.untyped_storage()._cdata == address


def _is_foreign(storage: torch.UntypedStorage) -> bool:
    """Tell whether the memory is not PyTorch's alone: NumPy's, DLPack's, another process's."""
    if not storage.resizable():  # what was only lent to PyTorch
        return True
    return storage.is_shared() and storage.device.type == "cpu"  # memory of a GPU counts as shared


def _layout(tensor: torch.Tensor) -> str:
    """Name the layout of a tensor that is not plainly strided."""
    if tensor.is_nested:
        return "nested"
    return "sparse" if "sparse" in str(tensor.layout) else "layout"
