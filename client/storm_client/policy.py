"""Decides which saved tensors may be offloaded, and why the others are kept. It has no side effect.

A tensor may be offloaded if it is a plain strided tensor in memory that only PyTorch uses, and if
its storage has the tensor's bytes. In doubt a tensor is kept, which costs memory but never changes
a value.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from storm_client.monitoring.layers import Roots, modules_inside
from storm_client.planner import OFFLOAD, Decision, Keep
from storm_client.saved.distributed import nbytes_of, part_of
from storm_client.saved.snapshots import base_of

if TYPE_CHECKING:
    from storm_client.native import Native, _follow

__all__ = ["Inside", "Policy"]

LOOK_EVERY: Final = 64
"""One in this many look-ups of the modules' storages also looks for new parameters."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Exact types; a subclass may give its bytes any meaning."""

_TABLES = ("_parameters", "_buffers")

_QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
"""Applies also to tensors that are not quantized: bytes viewed as one of these types."""

_SMALL, _PARAMETER, _OUTSIDE = Keep("small"), Keep("parameter"), Keep("outside")
_FOREIGN, _SUBCLASS = Keep("foreign"), Keep("subclass")

_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


class Inside(Protocol):
    """Knows whether the calling thread is inside one of certain layers."""

    depth: int


class _Owner(NamedTuple):
    """The place of a module's tensor. PyTorch refuses to swap tensors that have weak references."""

    module: weakref.ref[torch.nn.Module]
    table: str
    name: str

    def tensor(self) -> torch.Tensor | None:
        """Return the plain strided tensor at this place, of a DTensor the local one, if any."""
        module = self.module()
        table = {} if module is None else getattr(module, self.table)
        tensor = table[self.name] if self.name in table else None  # noqa: SIM401 - as below
        if tensor is None or type(local := part_of(tensor)) not in _PLAIN:
            return None
        return local if local.layout is torch.strided else None


class Policy:
    """The policy of one Offload."""

    def __init__(self, modules: Iterable[torch.nn.Module], min_bytes: int) -> None:
        """Never offload parameters and buffers of `modules`, or tensors below `min_bytes`."""
        self.min_bytes = min_bytes
        self._roots = Roots(modules)
        self.layers: Inside | None = None
        """If set, only tensors saved inside these layers may be offloaded."""
        self._owned: dict[int, _Owner] = {}
        """By storage address: the place of one of the modules' tensors in that storage."""
        self._is_sharded = False
        """Whether one of them is a DTensor: blocks may compute with others, gathered for them."""
        self._native: _follow.ModelStorages | None = None
        """The same table for compiled code."""
        self._may_be_stale = True
        self._looks = -1
        self._hooks_without: int | None = None
        """How many hooks had ever been registered when no parameter had one; None before that."""

    @property
    def modules(self) -> tuple[torch.nn.Module, ...]:
        """The modules, held weakly."""
        return self._roots.living()

    def refresh(self) -> None:
        """Look the modules' storages up again before the next tensor is declared not theirs.

        Moving a module gives its parameters new storages. Looking through a model's modules takes
        up to a millisecond, and most steps' saved tensors need no such look-up.
        """
        self._may_be_stale = True

    def _look_up(self) -> None:
        self._may_be_stale = False
        self._looks += 1
        if self._looks % LOOK_EVERY and all(map(self._is_known, self._owned)):
            return  # nothing has moved; new ones are kept anyway, since somebody else holds them
        owned: dict[int, _Owner] = {}
        is_sharded = False
        for part in modules_inside(self.modules):
            reference = weakref.ref(part)
            for kind in _TABLES:
                for name in getattr(part, kind).keys():  # noqa: SIM118 - of TorchScript's modules
                    owner = _Owner(reference, kind, name)
                    tensor = owner.tensor()
                    if tensor is not None:
                        is_sharded |= type(getattr(part, kind)[name]) not in _PLAIN
                        owned[tensor.untyped_storage()._cdata] = owner
        self._owned, self._is_sharded = owned, is_sharded
        self._native = self._hooks_without = None

    def owned(self, follow: Native) -> _follow.ModelStorages:
        """Return the modules' storages at the last look-up, for compiled code."""
        if self._native is None:
            if not self._owned:
                self._look_up()
            found: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
            for owner in self._owned.values():
                if (tensor := owner.tensor()) is not None:
                    found[not self._is_at_rest(owner)].append(tensor)
            self._native = follow.ModelStorages(*found)
        return self._native

    def is_at_rest(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies in a parameter whose bytes only counted writes change.

        They also stay in place between the passes: nobody gathers them for a block.
        """
        address = tensor.untyped_storage()._cdata
        owner = self._owned.get(address)
        return owner is not None and self._is_known(address) and self._is_at_rest(owner)

    def _is_at_rest(self, owner: _Owner) -> bool:
        tensor = owner.tensor()
        if tensor is None or self._is_sharded or owner.table != "_parameters":
            return False
        storage = tensor.untyped_storage()
        return storage.nbytes() == tensor.nbytes and not _is_foreign(storage)

    def acts_on_gradients_early(self) -> bool:
        """Return whether gradients may be used before the end of the pass that computes them.

        Ranks exchange gradients within the pass, and a parameter's hook may run an optimizer. The
        parameters are looked at after a hook was registered anywhere, and after all storages were
        looked up: it takes longer than all else between a forward pass and its backward pass. A
        parameter that joins the modules with hooks may count only after the latter.
        """
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return True
        registered = RemovableHandle.next_id
        if self._hooks_without != registered:
            if any(map(_has_hooks, modules_inside(self.modules))):
                return True
            self._hooks_without = registered
        return False

    def small_owned_bytes(self) -> int:
        """Return the total bytes of the modules' parameters below `min_bytes`."""
        parameters = chain.from_iterable(module.parameters() for module in self.modules)
        return sum(one for one in map(nbytes_of, parameters) if one < self.min_bytes)

    def decide(
        self, tensor: torch.Tensor, least: int | None = None, *, is_expected: bool = False
    ) -> Decision:
        """Return the decision about `tensor`, as far as the tensor and its storage tell.

        Tensors below `least` bytes are kept; None stands for `min_bytes`. This is called for every
        saved tensor, so the most common cases are checked first. A small tensor may be a view,
        which keeps a large storage alive. If steps before have offloaded the tensor, so that it
        `is_expected`, the modules' storages are not looked up for it.
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
        return self._decide_large(tensor, least, is_expected=is_expected)

    def decide_storage(self, storage: torch.UntypedStorage, least: int | None = None) -> Decision:
        """Return the decision about a storage; `decide` has to allow one of its tensors first."""
        if storage.nbytes() < (self.min_bytes if least is None else least):
            return _SMALL
        return _FOREIGN if _is_foreign(storage) else OFFLOAD

    def _decide_large(self, tensor: torch.Tensor, least: int, *, is_expected: bool) -> Decision:
        """Finish `decide` for a plain tensor that is large enough."""
        if tensor._is_zerotensor():
            return Keep("zero")  # forward-mode differentiation makes these, without memory
        storage = tensor.untyped_storage()
        looks = self._may_be_stale and not is_expected
        if type(tensor) is torch.nn.Parameter or self._is_owned(
            tensor, storage._cdata, looks=looks
        ):
            return _PARAMETER
        if tensor.requires_grad and base_of(tensor).is_leaf and tensor.grad_fn is None:
            return Keep("leaf")  # the graph itself holds the leaf to accumulate its gradient
        if tensor.is_quantized or tensor.dtype in _QUANTIZED:
            return Keep("quantized")
        return Keep("inference") if tensor.is_inference() else self.decide_storage(storage, least)

    def _is_owned(self, tensor: torch.Tensor, address: int, *, looks: bool) -> bool:
        """Return whether `tensor` is, or is a view of, a parameter or buffer of the modules.

        An operation's result is one only if it is a view. If it seems to be none, and `looks`, the
        modules' storages are looked up once more.
        """
        if self._is_known(address):
            return True
        base = tensor._base
        if isinstance(base, torch.nn.Parameter):
            return True
        if not looks or (tensor if base is None else base).grad_fn is not None:
            return False
        self._look_up()
        return self._is_known(address)

    def _is_known(self, address: int) -> bool:
        """Return whether a storage is that of a module's tensor, as of the last look-up."""
        owner = self._owned.get(address)
        tensor = None if owner is None else owner.tensor()
        # A freed storage's address may have been reused for another storage.
        return tensor is not None and tensor.untyped_storage()._cdata == address


def _is_foreign(storage: torch.UntypedStorage) -> bool:
    """Return whether others may use the memory, too: NumPy, DLPack or another process."""
    if not storage.resizable():  # PyTorch has only borrowed the memory
        return True
    return storage.is_shared() and storage.device.type == "cpu"  # GPU memory counts as shared


def _layout(tensor: torch.Tensor) -> str:
    """Return the layout's name for a tensor that is not plainly strided."""
    if tensor.is_nested:
        return "nested"
    return "sparse" if "sparse" in str(tensor.layout) else "layout"


def _has_hooks(module: torch.nn.Module) -> bool:
    """Return whether a hook uses the gradient of a module's own parameter."""
    return any(
        parameter._post_accumulate_grad_hooks or parameter._backward_hooks
        for parameter in module._parameters.values()
        if parameter is not None
    )
