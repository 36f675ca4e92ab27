"""A float32 tensor that is not there, because who needs it is content with its rounded values.

Logits are half-precision numbers cast to float32, and their gradient is cast back. A `Deferred`
stands for such a tensor, with its type and shape and its place in the graph, and knows how to
compute it, and how to have it in half precision instead. Operations that only move its elements
give another. Whatever else is done with one is done with the tensor itself, which is computed then.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["ADVICE", "USE", "Deferred", "Root", "Watch"]

ADVICE: Final = 'pass loss="plain" to offload(), which has the copy made at once'

_aten = torch.ops.aten
_MOVES: Final[frozenset[Any]] = frozenset(
    (
        _aten._unsafe_view.default,
        _aten.clone.default,
        _aten.permute.default,
        _aten.select.int,
        _aten.select_backward.default,
        _aten.slice.Tensor,
        _aten.slice_backward.default,
        _aten.squeeze.default,
        _aten.squeeze.dim,
        _aten.squeeze.dims,
        _aten.t.default,
        _aten.transpose.int,
        _aten.unsqueeze.default,
        _aten.view.default,
    )
)
"""What moves elements, and adds zeros: a cast may come before or behind."""

_ALIASES: Final[frozenset[Any]] = frozenset((_aten.alias.default, _aten.detach.default))

_LOOKS: Final = """
    device dtype is_cpu is_cuda is_leaf is_meta is_sparse itemsize layout nbytes ndim requires_grad
    shape
"""
_ASKS: Final = """
    __getitem__ __len__ contiguous dim element_size flatten float is_contiguous is_floating_point
    narrow nelement numel permute reshape select size squeeze stride transpose unflatten unsqueeze
    view
"""
_PASSED: Final[frozenset[Any]] = frozenset(
    [getattr(Tensor, name).__get__ for name in _LOOKS.split()]
    + [
        getattr(owner, name)
        for owner in (Tensor, torch)
        for name in _ASKS.split()
        if hasattr(owner, name)
    ]
)
"""What may be asked of a tensor that is not there."""

_WATCHES: Final[frozenset[Any]] = frozenset(
    (
        torch._C.TensorBase.__dict__["grad"].__get__,
        torch._C.TensorBase.__dict__["grad_fn"].__get__,
        Tensor.backward,
        Tensor.register_hook,
        Tensor.retain_grad,
        torch.autograd.backward,
        torch.autograd.grad,
    )
)
"""What lets somebody see its gradient."""

_Move = tuple[Any, tuple[Any, ...], dict[str, Any]]


class Watch:
    """Whether somebody may look at a deferred tensor's gradient."""

    is_on = False


class Use:
    """How this process uses the gradients of losses."""

    differentiates_twice = False
    """Whether it has asked for a gradient's graph, which one of deferred logits has not."""


USE: Final = Use()


class Root(ABC):
    """What a Deferred and all that are moved from it stand for."""

    def __init__(self) -> None:
        self.watch = Watch()
        self._shown: list[tuple[Tensor, int]] = []
        """The tensors that were given to who looked, and the versions that they began at."""

    @property
    @abstractmethod
    def has_halves(self) -> bool:
        """Whether nobody has looked at the tensor itself, so that halves may be taken instead."""

    @abstractmethod
    def halves(self) -> Tensor:
        """Return the tensor in half precision; no part of the graph."""

    @abstractmethod
    def values(self) -> Tensor:
        """Return the tensor; no part of the graph."""

    def show(self, tensor: Tensor) -> None:
        """Note a tensor in whose memory the values lie, or a part of them."""
        self._shown.append((tensor, tensor._version))

    def check(self, *, are_alone: bool) -> None:
        """Check that who looks at one finds what others have done to another.

        Raises:
            RuntimeError: somebody has written to one; that is found by nobody else, and by this one
                only if they `are_alone`.
        """
        if are_alone and len(self._shown) < 2:
            return
        if any(tensor._version != version for tensor, version in self._shown):
            raise RuntimeError(
                "float() of logits was changed in place, by a view or by other ways than PyTorch's "
                f"Python functions, and is read elsewhere; {ADVICE}"
            )


class Deferred(Tensor):
    """A float32 tensor without memory."""

    root: Root
    _path: tuple[_Move, ...]
    """What makes it of the root's tensor."""
    _like: Tensor
    """A tensor of its shape and strides on the meta device."""
    _there: Tensor | None
    """The tensor itself, once somebody has looked at it; in the graph behind this one."""

    @classmethod
    def of(
        cls, root: Root, like: Tensor, device: torch.device, path: tuple[_Move, ...] = ()
    ) -> Deferred:
        """Return one of the shape and strides of `like`."""
        shape, strides = like.shape, like.stride()
        made: Deferred = Tensor._make_wrapper_subclass(
            cls, shape, strides, dtype=torch.float32, device=device
        )
        made.root, made._path, made._there = root, path, None
        made._like = torch.empty_strided(shape, strides, dtype=torch.float32, device="meta")
        return made

    def halves(self) -> Tensor | None:
        """Return its values in half precision; None where somebody has looked at itself."""
        return _moved(self.root.halves(), self._path) if self.root.has_halves else None

    def there(self) -> Tensor:
        """Return the tensor itself, whose gradient goes by way of this one.

        Raises:
            RuntimeError: another one of the root's was changed in place.
        """
        if self._there is None:
            with torch.no_grad():
                values = _moved(self.root.values(), self._path)
            with torch.enable_grad():
                apply: Any = _There.apply
                self._there = apply(self, values)
            self.root.show(self._there)
        self.root.check(are_alone=True)
        return self._there

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Answer what needs no memory, and move; do anything else with the tensor itself."""
        kwargs = kwargs or {}
        if func in _WATCHES:
            for one in tree_leaves((args, kwargs)):
                if isinstance(one, Deferred):
                    one.root.watch.is_on = True
        elif func not in _PASSED:
            args, kwargs = tree_map_only(Deferred, Deferred.there, (args, kwargs))
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares no class method
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Do the same below autograd, where operations arrive that C++ calls."""
        kwargs = kwargs or {}
        one = args[0] if args else None
        if isinstance(one, Deferred):
            if func in _ALIASES:
                return cls.of(one.root, one._like, one.device, one._path)
            if func in _MOVES:
                like = func(one._like, *args[1:], **kwargs)
                path = (*one._path, (func, args[1:], kwargs))
                return cls.of(one.root, like, one.device, path)
        _check_writes(func, args, kwargs)
        args, kwargs = tree_map_only(Deferred, _values, (args, kwargs))
        return func(*args, **kwargs)


def _moved(tensor: Tensor, path: tuple[_Move, ...]) -> Tensor:
    for function, arguments, options in path:
        tensor = function(tensor, *arguments, **options)
    return tensor


def _values(deferred: Deferred) -> Tensor:
    """Return its values for an operation below autograd, which has its place in the graph."""
    deferred.root.check(are_alone=False)
    return _moved(deferred.root.values(), deferred._path)


def _check_writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check that an operation below autograd writes to no tensor that is not there.

    Raises:
        RuntimeError: it does.
    """
    for number, argument in enumerate(func._schema.arguments):
        given = args[number] if number < len(args) else kwargs.get(argument.name)
        info = argument.alias_info
        if info is not None and info.is_write and isinstance(given, Deferred):
            raise RuntimeError(
                f"{func} writes to float() of logits by other ways than PyTorch's Python "
                f"functions; {ADVICE}"
            )


class _There(torch.autograd.Function):
    """Nothing but a place in the graph, behind a deferred tensor, for the tensor itself."""

    @staticmethod
    def forward(ctx: Any, deferred: Tensor, values: Tensor) -> Tensor:  # noqa: ARG004
        return values.detach()  # which may be written to in place, as a view may not

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return gradient, None
