"""PyTorch's check that a saved tensor was not changed in place, for tensors that left.

What stays true: a tensor that was changed in place after it was saved is never handed to the
backward pass; it raises what PyTorch raises. Hooks switch PyTorch's own check off.

A token is an alias of the tensor whose data was replaced by nothing: it shares the version
counter and holds no storage. Changes that PyTorch does not count (through `.data`, or an array
that shares the memory) are as invisible here as they are to PyTorch itself.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import torch

__all__ = ["KeptTensor", "SavedVersion"]

_SUFFIX = r"Backward\d*$"
"""What PyTorch leaves out of an operation's name in its message."""

_NOTHING: dict[torch.device, torch.Tensor] = {}
"""An empty tensor a device: it becomes the data of every token there."""


class SavedVersion(NamedTuple):
    """The version of a tensor at the time when it was saved."""

    token: torch.Tensor
    """Shares the tensor's version counter."""
    expected: int
    shape: torch.Size | None
    """For the message; nested tensors have none."""
    dtype: torch.dtype
    producer: tuple[str, int] | None
    """Name of the operation and the number of its output, where the tensor has one."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> SavedVersion:
        """Note the present version of `tensor` without keeping its memory."""
        version = cls.keeping(tensor)
        version.token.data = _nothing(tensor.device)
        return version

    @classmethod
    def keeping(cls, tensor: torch.Tensor) -> SavedVersion:
        """Note the present version of `tensor`; the token is an alias that keeps its memory."""
        token = tensor.detach()
        shape = None if tensor.is_nested else tensor.shape
        return cls(token, token._version, shape, tensor.dtype, _producer(tensor))

    @property
    def unchanged(self) -> bool:
        """Whether the tensor still has the version at which it was saved."""
        return self.token._version == self.expected

    def check(self) -> None:
        """Raise PyTorch's RuntimeError where the tensor has been changed in place since."""
        found = self.token._version
        if found != self.expected:
            raise RuntimeError(self._message(found))

    def alias(self, data: torch.Tensor) -> torch.Tensor:
        """Return a tensor with `data`'s content that counts its changes with the saved one's.

        A backward pass that changes what it unpacked is thus noticed by whoever unpacks next.
        """
        tensor = self.token.detach()
        tensor.data = data
        return tensor

    def _message(self, found: int) -> str:
        kind = torch.empty(0, dtype=self.dtype, device=self.token.device).type()
        shape = "" if self.shape is None else f" {list(self.shape)}"
        produced = ""
        if self.producer is not None:
            name, output = self.producer
            produced = f", which is output {output} of {re.sub(_SUFFIX, '', name)},"
        return (
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: [{kind}{shape}]{produced} is at version {found}; expected "
            f"version {self.expected} instead. Hint: enable anomaly detection to find the "
            "operation that failed to compute its gradient, with "
            "torch.autograd.set_detect_anomaly(True)."
        )


class KeptTensor(NamedTuple):
    """What autograd holds for a tensor that is not offloaded."""

    version: SavedVersion

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor, as an alias: an output that held itself would never be freed."""
        return self.version.token

    @classmethod
    def of(cls, tensor: torch.Tensor) -> KeptTensor:
        """Keep `tensor` and its present version."""
        return cls(SavedVersion.keeping(tensor))


def _producer(tensor: torch.Tensor) -> tuple[str, int] | None:
    node = tensor.grad_fn
    return None if node is None else (node.name(), tensor.output_nr)


def _nothing(device: torch.device) -> torch.Tensor:
    empty = _NOTHING.get(device)
    if empty is None:
        empty = _NOTHING[device] = torch.empty(0, device=device)
    return empty
