"""The float32 copy of logits that a loss is given: not made if only the loss reads it.

Models write `logits.float()` and pass views of the copy to the loss. Tiles need no such copy. So
once a line of a script was seen to do this, its next `float()` in a block returns a `Deferred`.
This has the copy's type and shape, but no memory. The loss takes the half-precision logits behind
it, and returns a gradient that is also deferred until it is cast. Any other reader of either gets
the tensor itself, which is computed then; from then on that line's copies are made at once.

`Tensor.float` is replaced once a loss in a block was given such a copy. The replacement defers
large tensors only.
"""

from __future__ import annotations

import sys
import threading
from re import sub
from types import CodeType, MethodType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from storm_client.devices import is_capturing
from storm_client.eager.function_modes import are_altered
from storm_client.hook_stack import innermost, untraced
from storm_client.losses.cross_entropy import is_plain
from storm_client.losses.deferred import ADVICE, USE, Deferred, Root
from storm_client.losses.log_probabilities import TILE_BYTES

__all__ = ["are_tiles_enabled", "is_eligible", "learn_call_site"]

_HALF: Final = frozenset((torch.float16, torch.bfloat16))
_CAST: Final = "ToCopy"
_VIEWING: Final = frozenset(
    (
        "Clone",
        "Permute",
        "Select",
        "Slice",
        "Squeeze",
        "T",
        "Transpose",
        "Unsqueeze",
        "UnsafeView",
        "View",
    )
)
"""Nodes that pass each element of a gradient on, or zero, and sum none."""

_float: Final = Tensor.float


class _Site(NamedTuple):
    """A call site of `float()`."""

    code: CodeType
    instruction: int


class _Sites(threading.local):
    """The latest copy that this thread has made, if it may be one for a loss."""

    node: int = -1
    """Sequence number of the copy's node in the graph."""
    site: _Site | None = None


_latest = _Sites()
_deferring: set[_Site] = set()
_refused: set[_Site] = set()


def are_tiles_enabled() -> bool:
    """Return whether the thread's innermost saved-tensor hooks are a block that wants tiles."""
    return bool(getattr(innermost(), "tiles_losses", False))


def is_eligible(logits: Tensor) -> bool:
    """Return whether logits are a plain tensor of more than a tile, and need a gradient."""
    if are_altered():  # first, since a mode of the script would see the questions below
        return False
    if not (is_plain(logits) and logits.requires_grad and torch.is_grad_enabled()):
        return False
    least = TILE_BYTES.get(logits.device.type)
    if least is None or logits.numel() * torch.float32.itemsize <= least:
        return False
    return not (logits.is_cuda and is_capturing(logits.device))


def learn_call_site(logits: Tensor) -> None:
    """Note that a loss was given float32 logits; if they are a copy, note where it was made."""
    node = logits.grad_fn
    while node is not None and _operation(node) in _VIEWING:
        node = node.next_functions[0][0]
    if node is None or _operation(node) != _CAST or logits.dtype != torch.float32:
        return
    if "float" not in Tensor.__dict__:
        Tensor.float = _Float(_replacement)  # type: ignore[method-assign]
    elif _latest.site is not None and node._sequence_nr() == _latest.node:
        _deferring.update({_latest.site} - _refused)


def _operation(node: Any) -> str:
    return sub(r"Backward\d*$", "", node.name())


class _Float(staticmethod):  # type: ignore[type-arg]  # it takes none at run time
    """The method `float`: a tensor's may defer the copy, and the class has PyTorch's own.

    So scripts' modes and subclasses, which may have it in a table, are passed what they know.
    Dynamo asks neither: of a static method, it compiles the function.
    """

    def __get__(self, tensor: Any, owner: type | None = None) -> Any:
        return MethodType(_replacement, tensor) if isinstance(tensor, Tensor) else _float


def _replacement(self: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """Act as `Tensor.float`; compilers trace this, and know C's function by its place alone."""
    if torch.compiler.is_compiling():
        return self.to(torch.float32, *arguments, **options)
    if arguments or options or not _may_defer(self):
        return _made(self, *arguments, **options)
    frame = sys._getframe(1)
    return _cast(self, _Site(frame.f_code, frame.f_lasti))


def _made(tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """Call PyTorch's own `float`.

    If a mode or a subclass is to get the call, PyTorch's C++ code looks `float` up in the class. It
    drops what a signal handler raises in `__get__` then, and fails for another reason.
    """
    try:
        return _float(tensor, *arguments, **options)
    except RuntimeError as error:
        if "torch API function must exist" in str(error):
            raise KeyboardInterrupt from error
        raise


def _may_defer(source: Tensor) -> bool:
    """Return whether a tensor may be logits whose copy will be given to a loss in tiles."""
    if type(source) is not Tensor or not are_tiles_enabled() or not is_eligible(source):
        return False
    return source.dtype in _HALF and source.is_contiguous()


@untraced
def _cast(self: Tensor, site: _Site) -> Tensor:
    """Return the copy of possible logits, or a deferred one if its call site is known."""
    if site in _deferring and not USE.differentiates_twice:
        apply: Any = _Deferral.apply
        deferred: Tensor = apply(self, _Upcast(self, site))
        return deferred
    made = _made(self)
    node = made.grad_fn
    if node is not None:  # a mode of the script may return a tensor without one
        _latest.node, _latest.site = node._sequence_nr(), site
    return made


class _Upcast(Root):
    """A copy that has not been made."""

    def __init__(self, source: Tensor, site: _Site) -> None:
        super().__init__()
        self._half = source.detach()
        self._version = source._version
        self._site = site
        self._full_precision: Tensor | None = None

    @property
    def has_half_precision(self) -> bool:
        """Whether the copy has not been made."""
        return self._full_precision is None

    def half_precision(self) -> Tensor:
        """Return the logits; raise RuntimeError if they were modified in place after `float()`."""
        if self._half._version != self._version:
            raise RuntimeError(
                f"logits {list(self._half.shape)} were changed in place after float() was called "
                f"on them, and before anything has read what that returned; {ADVICE}"
            )
        return self._half

    def full_precision(self) -> Tensor:
        """Return the copy, or raise as above; its call site's next copies are made at once."""
        if self._full_precision is None:
            _deferring.discard(self._site)
            _refused.add(self._site)
            self._full_precision = _made(self.half_precision())
        return self._full_precision


class _Deferral(torch.autograd.Function):
    """The node of a cast whose copy is not made."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, root: _Upcast) -> Tensor:
        ctx.dtype = source.dtype
        return Deferred.of(root, source, source.device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        half = gradient.half_precision() if isinstance(gradient, Deferred) else None
        return gradient.to(ctx.dtype) if half is None else half, None
