"""Runs a case without offload and with it: the same bits, or the same kind of error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import storm_client as storm
import torch
from support.training import assert_identical
from torch import Tensor

__all__ = ["Case", "Outcome", "Plain", "Way", "assert_same", "outcome"]


class Way(Protocol):
    """What a forward runs in: an Offload, or Plain."""

    def __enter__(self) -> object: ...

    def __exit__(self, *_: object) -> None: ...

    def stats(self) -> object:
        """Send what may leave, and wait until it has left."""
        ...


class Plain:
    """PyTorch as it is, with the face of an Offload."""

    def __enter__(self) -> Plain:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def stats(self) -> None:
        pass


Case = Callable[[Way, str], list[Tensor]]
"""Trains on a device, the forward in a way; returns the loss and every gradient."""

Outcome = list[Tensor] | type[Exception]


def outcome(case: Case, way: Way, device: str) -> Outcome:
    """Return copies of what a case gives, or the kind of the error that it raises.

    PyTorch raises RuntimeErrors; an error of another kind is a fault, and is not caught. For a
    counted change of a tensor, offload may raise its own instead.
    """
    try:
        return [tensor.detach().clone() for tensor in case(way, device)]
    except RuntimeError as error:
        kind: type[Exception] = type(error)
    except storm.ActivationLost as error:
        if "was changed in place (version" not in str(error):
            raise
        kind = RuntimeError
    _let_go_of_a_failed_graph(device)
    return kind


def assert_same(found: Outcome, expected: Outcome) -> None:
    """Compare bit for bit, or the kinds of errors."""
    if isinstance(found, type) or isinstance(expected, type):
        assert found is expected, (found, expected)
    else:
        assert_identical(found, expected)


def _let_go_of_a_failed_graph(device: str) -> None:
    """PyTorch keeps what a failed backward pass was about until the thread's next one."""
    torch.ones((), device=device, requires_grad=True).exp().backward()
