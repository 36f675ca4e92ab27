"""Sources hold the inputs of recipes: each returns a tensor as an operation found it.

A source is one of these:

- a packed tensor, kept or offloaded as autograd's saved tensors are;
- the result of another recipe;
- an alias, for parameters;
- a copy, for tensors that no operation made, which could change uncounted. The copy of a large
  tensor is packed as well, once a step.

For an overwritten value the recipe of the operation that made it is the only source.

A custom function's backward may write to the saved tensors that it gets, uncounted. PyTorch's own
do not. So before such a backward, or a script, gets memory that a living recipe reads, the recipe
gets a copy (`HeldInputs`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

import torch

from storm_client.eager.bits import copied
from storm_client.eager.settings import name_of_setting
from storm_client.errors import ActivationLost
from storm_client.saved.versions import SavedVersion, View

__all__ = [
    "ALIGNMENT_BYTES",
    "Alias",
    "Blank",
    "Copied",
    "HeldInputs",
    "OtherNumbers",
    "PackedInput",
    "PrivateCopy",
    "Source",
    "check_input",
    "is_own_backward",
    "lost",
]

ALIGNMENT_BYTES = 64
"""PyTorch's own memory begins at multiples of this, on a GPU of more. In memory with another
alignment, as NumPy's may have, kernels add the first elements separately."""

_LOST: Final = {
    "changed": "a tensor of shape {} was changed in place (version {}, now {}), from which a saved "
    "tensor was to be recomputed; change a copy of it, or pass offload(..., replay=False)",
    "overwritten": "a Triton kernel has written in place to memory from which a saved tensor was "
    "to be recomputed; have it write to a copy, or pass offload(..., replay=False)",
    "parameter": "the memory of a parameter of shape {} was freed, from which a saved tensor "
    "was to be recomputed; pass offload(..., replay=False)",
    "settings": "settings of PyTorch differ between the forward and the backward pass, in which a "
    "saved tensor was to be recomputed: {}; have them be the same in both passes, or pass "
    "offload(..., replay=False)",
    "drawn": "the operation that a saved tensor was to be recomputed by has drawn other random "
    "numbers than in the forward pass: another thread has drawn from the same generator, or set "
    "it, while that ran in one of the passes; give the thread a generator of its own, or pass "
    "offload(..., replay=False)",
    "memory": "a tensor that was kept on the device no longer exists: its storage was resized "
    "after the tensor was saved; pass offload(..., replay=False)",
    "layout": "computing a saved tensor again gave {} in {} bytes instead of what it was, in {}; "
    "pass offload(..., replay=False)",
}


class OtherNumbers(ActivationLost):
    """Other random numbers were drawn, perhaps by another thread too: the step must not go on."""


def lost(what: str, details: Sequence[Any] = ()) -> ActivationLost:
    """Return the error for a tensor that cannot be recomputed; compiled code uses it, too.

    The details of "settings" are the keys of those that differ.
    """
    if what == "settings":
        details = [", ".join(dict.fromkeys(map(name_of_setting, details)))]
    described = [View.of(one) if isinstance(one, torch.Tensor) else one for one in details]
    kind = OtherNumbers if what == "drawn" else ActivationLost
    return kind(_LOST[what].format(*described))


def check_input(version: SavedVersion) -> None:
    """Raise ActivationLost if a tensor that a recipe reads was modified in place since its save.

    PyTorch's own error would say that the gradient needs the tensor, which may not be so.
    """
    if not version.unchanged:
        shape = list(version.shape or ())
        raise lost("changed", (shape, version.expected, version.token._version))


class Source(Protocol):
    """An input of a recipe."""

    def tensor(self) -> torch.Tensor:
        """Return the tensor as the operation found it.

        Raises:
            RuntimeError, StormError: the tensor is not available.
        """
        ...


class Alias(NamedTuple):
    """A tensor that is always kept: a parameter, or the copy of a small tensor."""

    held: torch.Tensor
    version: int
    nbytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Alias:
        """Hold the tensor's memory and note its version."""
        held = tensor.detach()
        return cls(held, held._version, held.untyped_storage().nbytes())

    def tensor(self) -> torch.Tensor:
        """Return the tensor; ActivationLost if it has changed or its memory was freed."""
        if self.held._version != self.version:
            raise lost("changed", (list(self.held.shape), self.version, self.held._version))
        if self.held.untyped_storage().nbytes() != self.nbytes:
            raise lost("parameter", (list(self.held.shape),))
        return self.held


class PrivateCopy:
    """A copy of a tensor, for the streams of one device."""

    __slots__ = ("_copied_on", "_copy")

    def __init__(self, tensor: torch.Tensor) -> None:
        """Copy `tensor` on this thread's current stream."""
        self._copy = copied(tensor)
        self._copied_on = _stream_of(tensor)

    def tensor(self) -> torch.Tensor:
        """Return the copy, complete for this thread's current stream."""
        stream = _stream_of(self._copy)
        if self._copied_on is not None and stream is not None and stream != self._copied_on:
            stream.wait_stream(self._copied_on)
            self._copy.record_stream(stream)
        return self._copy


class Overwritable(Protocol):
    """A value in memory that others may write to."""

    is_overwritten: bool
    """Whether its memory was modified uncounted."""


class PackedInput:
    """A tensor that was packed like a saved tensor of autograd, so kept or offloaded."""

    __slots__ = ("__weakref__", "_copy", "_packed", "_unpack", "_value")

    def __init__(
        self,
        packed: Any,
        unpack: Callable[[Any], torch.Tensor],
        value: Overwritable | None = None,
    ) -> None:
        """Hold what `unpack` returns for `packed`: the memory of `value`, or a copy if None."""
        self._packed = packed
        self._unpack = unpack
        self._value = value
        self._copy: PrivateCopy | None = None

    def tensor(self) -> torch.Tensor:
        """Unpack the tensor; ActivationLost if its memory was modified."""
        if self._value is not None and self._value.is_overwritten:
            raise lost("overwritten")
        return self._unpack(self._packed) if self._copy is None else self._copy.tensor()

    def protect(self) -> None:
        """Read a copy from now on, since others may write to the memory.

        Raises:
            StormError: the tensor cannot be unpacked.
        """
        if self._copy is None and self._packed.version.unchanged:
            self._copy = PrivateCopy(self._unpack(self._packed))


def _stream_of(tensor: torch.Tensor) -> torch.cuda.Stream | None:
    """Return this thread's current stream on a tensor's device; None for a CPU."""
    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None


class HeldInputs:
    """The packed inputs of a step's living recipes, by the storages that they were packed from."""

    def __init__(self) -> None:
        """Start without any."""
        self._by_storage: dict[int, list[weakref.ref[PackedInput]]] = {}

    def add(self, held: PackedInput, storage: int) -> PackedInput:
        """Add an input whose memory autograd may get too; return it."""
        self._by_storage.setdefault(storage, []).append(weakref.ref(held))
        return held

    def protect(self, storage: int) -> None:
        """Have the inputs from a storage read copies from now on.

        Raises:
            StormError: one of them cannot be unpacked.
        """
        for reference in self._by_storage.get(storage, ()):
            held = reference()
            if held is not None:
                held.protect()


def is_own_backward() -> bool:
    """Return whether one of PyTorch's own backward functions is running in this thread.

    They do not write to saved tensors. Those of custom functions in C++ are all `CppFunction`.
    """
    kind = type(torch._C._current_autograd_node())
    return kind.__module__ == "builtins" and kind.__name__ not in ("NoneType", "CppFunction")


class Copied(NamedTuple):
    """A view of the packed copy of a tensor that no operation made.

    Writes to the tensor itself need not be counted. All recipes of a step that read the tensor
    share the copy.
    """

    copy: PackedInput
    view: View

    def tensor(self) -> torch.Tensor:
        """Unpack the copy and return the view."""
        return self.view.rebuild(self.copy.tensor().untyped_storage())


class Blank(NamedTuple):
    """Memory with the layout of a tensor, whose contents are not needed."""

    view: View
    device: torch.device

    @classmethod
    def like(cls, tensor: torch.Tensor) -> Blank:
        """Represent `tensor` by memory of PyTorch's own."""
        view = View.of(tensor)
        return cls(view._replace(offset=view.offset % ALIGNMENT_BYTES), tensor.device)

    def tensor(self) -> torch.Tensor:
        """Return a new tensor with arbitrary contents."""
        _, nbytes = self.view.span()
        empty = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return self.view.rebuild(empty.untyped_storage())
