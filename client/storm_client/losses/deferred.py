"""A float32 tensor that is not materialized, because its readers need only the rounded values.

Logits are half-precision numbers cast to float32, and their gradient is cast back. A `Deferred`
stands for such a tensor: it has the tensor's type, shape and place in the graph. It can compute the
tensor, and can provide it in half precision instead. Operations that only move its elements return
another `Deferred`. Any other operation runs on the tensor itself, which is computed then.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._guards import TracingContext
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["ADVICE", "USE", "Deferred", "Root", "Watch", "is_traced"]

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
"""Operations that move elements, and add zeros: a cast may be done before or after them."""

_ALIASES: Final[frozenset[Any]] = frozenset((_aten.alias.default, _aten.detach.default))

_METADATA_ATTRIBUTES: Final = """
    device dtype is_cpu is_cuda is_leaf is_meta is_sparse itemsize layout nbytes ndim requires_grad
    shape
"""
_METADATA_METHODS: Final = """
    __getitem__ __len__ contiguous dim element_size flatten float is_contiguous is_floating_point
    narrow nelement numel permute reshape select size squeeze stride transpose unflatten unsqueeze
    view
"""
_METADATA_ONLY: Final[frozenset[Any]] = frozenset(
    [getattr(Tensor, name).__get__ for name in _METADATA_ATTRIBUTES.split()]
    + [
        getattr(owner, name)
        for owner in (Tensor, torch)
        for name in _METADATA_METHODS.split()
        if hasattr(owner, name)
    ]
    + [torch._C.TensorBase.__dict__["_backward_hooks"].__set__]  # autograd calls it for a write
)
"""Functions that need no values of the tensor."""

_READS_GRADIENT: Final[frozenset[Any]] = frozenset(
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
"""Functions through which a reader may see the tensor's gradient."""

_Mode: Any = torch._C._TorchDispatchModeKey
_TRACING: Final = (_Mode.FAKE, _Mode.FUNCTIONAL, _Mode.PROXY)
"""Dispatch modes of what traces operations."""

_Move = tuple[Any, tuple[Any, ...], dict[str, Any]]


class Watch:
    """Whether a reader may see the gradient of a deferred tensor."""

    is_on = False


class Use:
    """How this process uses the gradients of losses."""

    differentiates_twice = False
    """Whether it has asked for a gradient with a graph, which a deferred gradient does not have."""


USE: Final = Use()


class Root(ABC):
    """The tensor that a Deferred, and every Deferred made from it by moves, stands for."""

    def __init__(self) -> None:
        self.watch = Watch()
        self._tracked: list[tuple[Tensor, int]] = []
        """Tensors that readers were given, and their versions at that time."""

    @property
    @abstractmethod
    def has_half_precision(self) -> bool:
        """Whether the tensor itself was never read, so that `half_precision` may be used."""

    @abstractmethod
    def half_precision(self) -> Tensor:
        """Return the tensor in half precision, outside of the graph."""

    @abstractmethod
    def full_precision(self) -> Tensor:
        """Return the tensor, outside of the graph."""

    def track(self, tensor: Tensor) -> None:
        """Note a tensor in whose storage the values, or a part of them, are."""
        self._tracked.append((tensor, tensor._version))

    def check(self, *, only_reader: bool) -> None:
        """Check that no reader misses an in-place change made through a tensor that was shown.

        Raises:
            RuntimeError: a shown tensor was modified in place; other readers do not see this. With
                `only_reader` a single shown tensor is exempt: its own reader sees the change. A
                custom function does not: in the graph it reads the tensor as it was.
        """
        if all(tensor._version == version for tensor, version in self._tracked):
            return
        if not only_reader or len(self._tracked) > 1 or _is_in_custom_function():
            raise RuntimeError(
                "float() of logits was changed in place, by a view or by other ways than PyTorch's "
                f"Python functions, and is read elsewhere; {ADVICE}"
            )


def _is_in_custom_function() -> bool:
    """Return whether the forward method of a custom function is running."""
    frame = None if torch.is_grad_enabled() else sys._getframe(1)
    while frame is not None and frame.f_code is not _APPLY:
        frame = frame.f_back
    return frame is not None


_APPLY: Final = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


class _Untraceable:
    """An attribute that compilers ask of each tensor: they are refused, others find none."""

    def __get__(self, deferred: Any, owner: Any = None) -> Any:
        _check_untraced()
        raise AttributeError


class Deferred(Tensor):
    """A float32 tensor without memory."""

    __tensor_flatten__ = _Untraceable()
    root: Root
    _path: tuple[_Move, ...]
    """The moves that make this tensor from the root's."""
    _like: Tensor
    """A tensor of its shape and strides on the meta device."""
    _materialized: Tensor | None
    """The tensor itself, once it was read."""
    _node: Any
    """This tensor's node in the graph when it was read."""

    @classmethod
    def of(
        cls, root: Root, like: Tensor, device: torch.device, path: tuple[_Move, ...] = ()
    ) -> Deferred:
        """Return a Deferred with the shape and strides of `like`."""
        shape, strides = like.shape, like.stride()
        made: Deferred = Tensor._make_wrapper_subclass(
            cls, shape, strides, dtype=torch.float32, device=device
        )
        made.root, made._path, made._materialized, made._node = root, path, None, None
        made._like = torch.empty_strided(shape, strides, dtype=torch.float32, device="meta")
        return made

    def half_precision(self) -> Tensor | None:
        """Return its values in half precision; None if the tensor itself has been read."""
        if not self.root.has_half_precision:
            return None
        return _moved(self.root.half_precision(), self._path)

    def materialize(self) -> Tensor:
        """Return the tensor itself, which is at this one's place in the graph.

        Raises:
            RuntimeError: another tensor of the root was modified in place, or this one by a custom
                function; or the reader is traced.
        """
        _check_untraced()
        if self._materialized is None:
            self._node = self._present_node()
            with _undisturbed():
                values = _moved(self.root.full_precision(), self._path)
                self._materialized = values if self._node is None else self._with_values(values)
            self.root.track(self._materialized)
        if self._is_changed():
            raise RuntimeError(f"float() of logits was changed by a custom function; {ADVICE}")
        self.root.check(only_reader=True)
        return self._materialized

    def _with_values(self, values: Tensor) -> Tensor:
        """Return a tensor of `values` at this one's place in the graph.

        So its readers pass their gradients to the node that readers of this one do, in PyTorch's
        order. Autograd gives a saved tensor that place, whatever a hook returns for it.
        """
        apply: Any = _Saving.apply
        with torch.enable_grad(), saved_tensors_hooks(lambda _: None, lambda _: values):
            behind = apply(self)  # its node has the saved tensor for as long as it is held
            (found,) = behind.grad_fn.saved_tensors
        placed: Tensor = found
        with torch._C.DisableTorchFunctionSubclass():
            if self.retains_grad:
                placed.retain_grad()
                placed.grad = self.grad
        return placed

    def shown(self) -> Tensor:
        """Return what its shape, gradient and moves are asked of: once it was read, the tensor."""
        return self if self._materialized is None or self._is_changed() else self.materialize()

    def _is_changed(self) -> bool:
        """Return whether a custom function, by its own word, has changed this tensor since then."""
        return self._present_node() is not self._node

    def _present_node(self) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return self.grad_fn

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Answer what needs no memory, and do moves; run anything else on the tensor itself."""
        kwargs = kwargs or {}
        if func in _READS_GRADIENT:
            for one in tree_leaves((args, kwargs)):
                if isinstance(one, Deferred):
                    one.root.watch.is_on = True
                    if one._materialized is None:  # its place in the graph knows no writes
                        one.root.check(only_reader=False)
        elif func not in _METADATA_ONLY:
            args, kwargs = tree_map_only(Deferred, Deferred.materialize, (args, kwargs))
            return func(*args, **kwargs)
        args, kwargs = tree_map_only(Deferred, Deferred.shown, (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares no class method
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Do the same below autograd, where operations called from C++ arrive."""
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
        args, kwargs = tree_map_only(Deferred, _full_precision, (args, kwargs))
        return func(*args, **kwargs)


def _moved(tensor: Tensor, path: tuple[_Move, ...]) -> Tensor:
    for function, arguments, options in path:
        tensor = function(tensor, *arguments, **options)
    return tensor


def _full_precision(deferred: Deferred) -> Tensor:
    """Return its values for an operation below autograd, which is in the graph already."""
    _check_untraced()
    deferred.root.check(only_reader=False)
    with _undisturbed():
        return _moved(deferred.root.full_precision(), deferred._path)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Have results be tensors for later readers, too, whatever the present one runs in.

    Those of inference mode have no gradient, and those of transforms of torch.func end with them.
    """
    with torch.inference_mode(False), torch.no_grad(), temporarily_clear_interpreter_stack():
        yield


def is_traced() -> bool:
    """Return whether this thread's operations are traced, or have results without values."""
    if TracingContext.try_get() is not None or torch._C._get_tracing_state() is not None:
        return True
    return any(torch._C._get_dispatch_mode(mode) is not None for mode in _TRACING)


def _check_untraced() -> None:
    """Raise RuntimeError in traced code, where the tensor itself would be a constant."""
    if is_traced():
        raise RuntimeError(f"traced or compiled code reads float() of logits; {ADVICE}")


def _check_writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise RuntimeError if an operation below autograd modifies a deferred tensor."""
    for number, argument in enumerate(func._schema.arguments):
        given = args[number] if number < len(args) else kwargs.get(argument.name)
        info = argument.alias_info
        if info is not None and info.is_write and isinstance(given, Deferred):
            raise RuntimeError(
                f"{func} writes to float() of logits by other ways than PyTorch's Python "
                f"functions; {ADVICE}"
            )


class _Saving(torch.autograd.Function):
    """Saves a tensor, and has nothing else to do with it."""

    @staticmethod
    def forward(ctx: Any, deferred: Tensor) -> Tensor:
        ctx.save_for_backward(deferred)
        return torch.empty(0)
