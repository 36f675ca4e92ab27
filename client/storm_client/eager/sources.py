"""How the inputs of recipes are held: each of these returns a tensor as an operation found it.

As what autograd would be handed for it (offloaded or kept); as the result of another recipe; as an
alias (parameters, and small results whose version is watched); or as a copy (what no operation
made, which could change without being counted; a large one is handed over as well, once a step).
Of what an operation has written over the operation that made it is the only source.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import torch

from storm_client.errors import ActivationLost
from storm_client.saved.versions import SavedVersion, View

if TYPE_CHECKING:
    from storm_client.eager.recompute import Result

__all__ = [
    "ALIGNMENT_BYTES",
    "Alias",
    "Blank",
    "Copied",
    "Made",
    "OtherNumbers",
    "Saved",
    "Source",
    "Written",
    "lost",
]

ALIGNMENT_BYTES = 64
"""At a multiple of which PyTorch's own memory begins, on a GPU of more. What lies otherwise, as
NumPy's may, has its first elements added by themselves."""

_LOST: Final = {
    "changed": "a tensor of shape {} was changed in place (version {}, now {}), from which a saved "
    "tensor was to be recomputed; change a copy of it, or pass offload(..., replay=False)",
    "overwritten": "a Triton kernel has written in place to memory from which a saved tensor was "
    "to be recomputed; have it write to a copy, or pass offload(..., replay=False)",
    "parameter": "the memory of a parameter of shape {} is not there, from which a saved tensor "
    "was to be recomputed; pass offload(..., replay=False)",
    "settings": "settings of PyTorch (attention kernels, oneDNN, cuDNN, precision, default dtype, "
    "number of threads, small numbers as zero, overridden operators), or on a CPU the thread "
    "itself, are others in the backward pass, in which a saved tensor was to be recomputed, than "
    "in the forward pass; have them be the same in both passes, or pass offload(..., replay=False)",
    "drawn": "the operation that a saved tensor was to be recomputed by has drawn other random "
    "numbers than in the forward pass: another thread has drawn from the same generator, or set "
    "it, while that ran in one of the passes; give the thread a generator of its own, or pass "
    "offload(..., replay=False)",
    "memory": "the memory of a tensor that had stayed is gone: its storage was resized after the "
    "tensor was saved; pass offload(..., replay=False)",
    "layout": "computing a saved tensor again gave {} in {} bytes instead of what it was, in {}; "
    "pass offload(..., replay=False)",
}


class OtherNumbers(ActivationLost):
    """Other random numbers were drawn, perhaps by another thread too: nobody may go on."""


def lost(what: str, details: Sequence[Any] = ()) -> ActivationLost:
    """Return the error of a tensor that cannot be recomputed; compiled code asks for it, too."""
    told = [View.of(one) if isinstance(one, torch.Tensor) else one for one in details]
    kind = OtherNumbers if what == "drawn" else ActivationLost
    return kind(_LOST[what].format(*told))


class Overwritable(Protocol):
    """A value of the step."""

    is_overwritten: bool
    """Whether its memory has got other bytes, uncounted."""


class Source(Protocol):
    """An input of a recipe."""

    def tensor(self) -> torch.Tensor:
        """Return it as it was.

        Raises:
            RuntimeError, StormError: it cannot be had.
        """
        ...


class Alias(NamedTuple):
    """A tensor that stays: a parameter, or something small."""

    held: torch.Tensor
    version: int
    nbytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Alias:
        """Hold the tensor's memory and watch its version."""
        held = tensor.detach()
        return cls(held, held._version, held.untyped_storage().nbytes())

    def tensor(self) -> torch.Tensor:
        """Return it; ActivationLost if it has changed or its memory was given up."""
        if self.held._version != self.version:
            raise lost("changed", (list(self.held.shape), self.version, self.held._version))
        if self.held.untyped_storage().nbytes() != self.nbytes:
            raise lost("parameter", (list(self.held.shape),))
        return self.held


class Saved(NamedTuple):
    """A tensor that was handed over as autograd hands tensors over."""

    packed: Any
    unpack: Callable[[Any], torch.Tensor]
    value: Overwritable | None = None
    """Which it was; None for a copy."""

    def tensor(self) -> torch.Tensor:
        """Bring it back; ActivationLost if its memory has got other bytes."""
        if self.value is not None and self.value.is_overwritten:
            raise lost("overwritten")
        return self.unpack(self.packed)


class Copied(NamedTuple):
    """A view of what no operation made: of the copy that was handed over in its stead.

    Writes to it need not be counted. All recipes of a step that read it share the copy.
    """

    copy: Saved
    view: View

    def tensor(self) -> torch.Tensor:
        """Bring the copy back."""
        return self.view.rebuild(self.copy.tensor().untyped_storage())


class Blank(NamedTuple):
    """Memory in which a tensor would lie as one did, of which nothing else is asked."""

    view: View
    device: torch.device

    @classmethod
    def like(cls, tensor: torch.Tensor) -> Blank:
        """Stand for a tensor in memory of PyTorch's own."""
        view = View.of(tensor)
        return cls(view._replace(offset=view.offset % ALIGNMENT_BYTES), tensor.device)

    def tensor(self) -> torch.Tensor:
        """Return it, with whatever is in the memory."""
        _, nbytes = self.view.span()
        empty = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return self.view.rebuild(empty.untyped_storage())


class Made(NamedTuple):
    """A view of what another recipe makes, at a version."""

    result: Result
    view: View
    version: SavedVersion

    def tensor(self) -> torch.Tensor:
        """Have it made, from its own inputs if it was changed in place since."""
        if self.version.unchanged and not self.result.is_overwritten:
            return self.result.viewed(self.view)
        if not self.result.has_recipe:
            self.version.check()
        return self.result.viewed_anew(self.view)


class Written(NamedTuple):
    """The same for an operation that writes to it: the memory is nobody else's."""

    result: Result
    view: View

    def tensor(self) -> torch.Tensor:
        """Have it made from its own inputs: its memory has got other bytes since."""
        return self.result.viewed_for_writing(self.view)

    @classmethod
    def over(cls, result: Result, tensor: torch.Tensor) -> Written:
        """Stand for what a tensor was before it was written to."""
        result.is_overwritten = True
        result.expect_use()
        return cls(result, View.of(tensor))
