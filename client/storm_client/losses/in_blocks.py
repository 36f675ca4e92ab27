"""PyTorch's own cross-entropy, in tiles inside an offload block: same bits, less memory.

Losses end in `torch.nn.functional.cross_entropy`, those of `nn.CrossEntropyLoss` and transformers
among them. Scripts also hold the function under names of their own. So the function object
stays the same, and its code is replaced once by code that calls this module. Outside of an offload
block of the calling thread, and in any case of doubt, PyTorch's code runs.

For each kind of call, both ways are first run in this process, on the given logits. Tiles are used
if both have the same loss and gradient, bit for bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from inspect import signature
from threading import Lock
from types import FunctionType
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own name for it
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from storm_client.hook_stack import innermost, untraced
from storm_client.losses.cross_entropy import Options, in_tiles, is_plain, of_pytorch
from storm_client.losses.deferred import Deferred
from storm_client.losses.kernels import have_same_bits
from storm_client.losses.upcasts import are_tiles_enabled, is_eligible, learn_call_site
from storm_client.planner.in_flight import give_back_unused
from storm_client.planner.problem import PlainLoss
from storm_client.transport.memory_pressure import MayFail

__all__ = ["cross_entropy", "substitute"]

log = logging.getLogger(__name__)

ENOUGH_SHAPES: Final = 8
"""After equal bits for so many numbers of rows, other numbers of the same kind are trusted."""

_NAME: Final = "cross_entropy"

_LOCK: Final = Lock()


def substitute() -> None:
    """Make PyTorch's function call this module from now on; leave an unknown version unchanged."""
    global _plain, _code  # noqa: PLW0603 - exchanged once, as the code is
    with _LOCK:
        function = _pytorch_function()
        if function is None or function.__code__ is _code:
            return
        original = function.__code__
        _plain = FunctionType(original, function.__globals__, _NAME, function.__defaults__)
        # Readers of sources, such as TorchScript, have to find PyTorch's.
        _code = _replacement.__code__.replace(
            co_filename=original.co_filename,
            co_firstlineno=original.co_firstlineno,
            co_name=original.co_name,
            co_qualname=original.co_qualname,
        )
        function.__code__ = _code
        untraced(function)
        del function.__dict__["_torchdynamo_disable"]  # Dynamo knows the function, as before


def _pytorch_function() -> FunctionType | None:
    """Return PyTorch's function; None if a script has replaced it, or its signature is unknown."""
    function = F.cross_entropy
    if type(function) is not FunctionType or function.__globals__ is not F.__dict__:
        return None
    known = list(signature(_replacement).parameters)
    return function if list(signature(function).parameters) == known else None


def _replacement(  # noqa: PLR0917 - PyTorch's order
    input: Any,  # noqa: A002 - PyTorch's name
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: Any = -100,
    reduce: Any = None,
    reduction: Any = "mean",
    label_smoothing: Any = 0.0,
) -> Any:
    """Act as the code of PyTorch's function; this runs with that function's globals."""
    from storm_client.losses.in_blocks import cross_entropy as ask

    return ask(
        input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
    )


_code: Any = None
_plain: Callable[..., Tensor] = F.cross_entropy
"""PyTorch's function with its original code."""


@untraced
def cross_entropy(  # noqa: PLR0917 - PyTorch's order
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    size_average: bool | None,
    ignore_index: int,
    reduce: bool | None,
    reduction: str,
    label_smoothing: float,
) -> Tensor:
    """Return what PyTorch's function returns, in tiles if they are known to have its bits."""
    if size_average is None and reduce is None and are_tiles_enabled():
        options = Options(weight, ignore_index, reduction, label_smoothing)
        loss = _in_tiles(logits, target, options)
        if loss is not None:
            return loss
    return _plain(
        logits, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
    )


def _in_tiles(logits: Tensor, target: Tensor, options: Options) -> Tensor | None:
    """Return the loss; None if PyTorch's function has to compute it, or to raise an error."""
    if target is None or not is_plain(target):
        return None
    if not is_eligible(logits) or not logits.dim():
        return None
    if logits.is_cuda and logits.dim() > 2:  # PyTorch itself adds their sum in no fixed order
        return None
    half = logits.half_precision() if isinstance(logits, Deferred) else None
    if half is not None:
        call = _Call(half, target, options, torch.float32)
    else:
        logits = logits.materialize() if isinstance(logits, Deferred) else logits
        call = _Call(logits, target, options, None)
    try:
        with torch._C.DisableTorchFunction():
            loss = in_tiles(logits, target, options, None) if _PROVED.trusts(call) else None
    except (IndexError, TypeError, ValueError):
        return None
    if loss is not None:
        innermost().note_loss(call.plain_loss(loss.dtype))
        if half is None:
            learn_call_site(logits)
    return loss


class _Call(NamedTuple):
    """The arguments of a call."""

    logits: Tensor
    target: Tensor
    options: Options
    dtype: torch.dtype | None
    """The type that deferred logits are cast to; None if the logits are not deferred."""

    def in_tiles(self, logits: Tensor) -> Tensor | None:
        return in_tiles(logits, self.target, self.options, self.dtype)

    def plain(self, logits: Tensor) -> Tensor:
        return of_pytorch(logits, self.target, self.options, self.dtype, _plain)

    def plain_loss(self, computed: torch.dtype) -> PlainLoss:
        """Return what PyTorch's own loss takes, less the logits that tiles save.

        Forward that is the output of the softmax, and its input if a cast makes that. Backward it
        is the output of the softmax, its gradient, and the gradient of its input. On a GPU the
        softmax itself does the cast of autocast.
        """
        logits = self.logits
        given = logits.dtype if logits.is_cuda and self.dtype is None else computed
        nbytes, cast = logits.numel() * computed.itemsize, logits.numel() * given.itemsize
        forward = nbytes + (cast if given != logits.dtype else 0)
        return PlainLoss(forward, 2 * nbytes + cast - logits.nbytes)

    def first(self, rows: int) -> _Call:
        """Return the call with its first `rows` rows."""
        return self._replace(logits=self.logits[:rows], target=self.target[:rows])

    def kind(self) -> tuple[Any, ...]:
        """Return all that may decide which code of PyTorch runs, except the number of rows."""
        logits, device = self.logits, self.logits.device
        return (
            device,
            logits.dtype,
            self.dtype,
            logits.shape[1:],
            logits.is_contiguous(),
            logits.data_ptr() % 16,
            self.target.dtype,
            self.options[1:],
            torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type),
            torch.are_deterministic_algorithms_enabled(),
        )


class _Proved:
    """Kinds of calls, with the numbers of rows for which tiles had PyTorch's bits."""

    def __init__(self) -> None:
        self._rows: dict[tuple[Any, ...], set[int]] = {}
        """Empty for a kind that PyTorch has to compute."""

    def trusts(self, call: _Call) -> bool:
        """Return whether tiles have a call's bits; compute a call of a new kind both ways."""
        kind, rows = call.kind(), len(call.logits)
        known = self._rows.get(kind)
        if known is None:
            return self._learn(kind, call)
        if not known or rows in known or len(known) >= ENOUGH_SHAPES:
            return bool(known)
        return self._learn(kind, call)

    def _learn(self, kind: tuple[Any, ...], call: _Call) -> bool:
        found, rows = False, len(call.logits)
        while rows and not found:
            try:
                with MayFail():
                    found = _compared(call.first(rows))
                break
            except torch.OutOfMemoryError:
                rows //= 2
        give_back_unused([call.logits.device] if call.logits.is_cuda else [])
        if found:
            self._rows.setdefault(kind, set()).add(len(call.logits))
        else:
            log.info("PyTorch's own loss is used for %s", kind)
            self._rows[kind] = set()
        return found


_PROVED: Final = _Proved()


def _compared(call: _Call) -> bool:
    """Return whether tiles have the loss and gradient of PyTorch; raise if memory is short."""
    with saved_tensors_hooks(_same, _same):  # so that no block is innermost
        ours = _run(call.in_tiles, call.logits)
        if ours is None:
            return False
        theirs = _run(call.plain, call.logits)
    assert theirs is not None
    return all(map(have_same_bits, ours, theirs))


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _run(
    function: Callable[[Tensor], Tensor | None], logits: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Return a loss and the logits' gradient; None without tiles."""
    leaf = logits.detach().requires_grad_()
    loss = function(leaf)
    if loss is None:
        return None
    outer = torch.linspace(0.37, 1.21, loss.numel(), dtype=loss.dtype, device=loss.device)
    (gradient,) = torch.autograd.grad(loss, leaf, outer.view(loss.shape))
    return loss.detach(), gradient
