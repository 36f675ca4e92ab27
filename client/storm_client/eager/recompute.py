"""How a value is recomputed: the operation that has made it, run on the same inputs.

A recipe is made when the operation has just been run, so its inputs are at hand, and are held as
`sources.py` says. A result holds its recipe and that its inputs: what autograd still holds can be
made, and dies with it.

What is made is held for as long as somebody is expected to ask for it once more.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from storm_client.eager.bits import copied
from storm_client.eager.function_modes import are_altered, unaltered
from storm_client.eager.operations import Function, bound, is_simple
from storm_client.eager.settings import settings_of_kernels
from storm_client.eager.sources import Source, lost
from storm_client.saved.ranges import WeakStorage
from storm_client.saved.versions import SavedVersion, View

if TYPE_CHECKING:
    from storm_client.eager.proofs import Trial
    from storm_client.native import _follow

__all__ = [
    "Input",
    "Pins",
    "Recipe",
    "Replayed",
    "Result",
]

_AS_IT_IS = nullcontext()
_autocasts = torch.is_autocast_enabled
_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class Recipe:
    """One operation that was run, with all that decides what it makes."""

    __slots__ = (
        "_arguments",
        "_autocast",
        "_device",
        "_differentiates",
        "_draw",
        "_function",
        "_options",
        "_settings",
        "results",
    )

    def __init__(
        self,
        function: Function,
        arguments: Sequence[Any],
        options: Mapping[str, Any],
        device: str,
        draw: _follow.Draw | None = None,
        *,
        casts: bool = True,
    ) -> None:
        """Hold a call whose tensors have been replaced by Sources, at most one list deep.

        `draw` is what it has drawn of random numbers; None for none. Without `casts` autocast was
        off when it ran, whatever it is now.
        """
        self.results: list[tuple[weakref.ref[Result], int]] = []
        """Those that are one of several that it makes, with their places."""
        self._draw = draw
        self._function = function
        self._arguments = arguments
        self._options = options
        self._device = device
        is_on = casts and _autocasts(device)
        self._autocast = torch.get_autocast_dtype(device) if is_on else None
        """To which dtype, where it was on."""
        self._settings = self._present_settings()
        self._differentiates = not is_simple(function) and torch.is_grad_enabled()
        """Whether it may have chosen its kernels by what needs a gradient."""

    def takes_present_settings(self) -> None:
        """Run by the settings that there are now, for one who asks how long that takes alone.

        PyTorch itself changes some in a process's first step: which attention comes first.
        """
        self._settings = self._present_settings()

    def run(self) -> Any:
        """Run the operation again, as no part of any graph.

        Raises:
            ActivationLost: it would make other bits now.
        """
        if self._settings != self._present_settings():
            raise lost("settings")
        arguments = [self._filled(argument) for argument in self._arguments]
        options = {name: self._filled(value) for name, value in self._options.items()}
        records = self._differentiates
        # In a backward pass there is mostly nothing to change, and that takes longer than to look.
        grad = _AS_IT_IS if torch.is_grad_enabled() is records else torch.set_grad_enabled(records)
        hooks = _saving_nothing() if records and _top_hooks(True) is not None else _AS_IT_IS
        modes = unaltered() if are_altered() else _AS_IT_IS
        with modes, torch._C.DisableTorchFunction(), grad, hooks, self._autocast_as_then():
            function = bound(self._function)
            if self._draw is None:
                made = function(*arguments, **options)
            else:
                made = self._draw.again(function, arguments, options)
        return _detached(made) if records else made

    def _present_settings(self) -> tuple[object, ...]:
        return settings_of_kernels(self._device, is_simple=is_simple(self._function))

    def _autocast_as_then(self) -> AbstractContextManager[object]:
        if self._autocast is None and not _autocasts(self._device):
            return _AS_IT_IS
        return _casting(self._device, self._autocast)

    def _filled(self, argument: Any) -> Any:
        if isinstance(argument, Input):
            tensor = argument.source.tensor()
            if self._differentiates and argument.requires_grad:
                return tensor.detach().requires_grad_()
            return tensor
        if type(argument) in (list, tuple):
            return type(argument)(map(self._filled, argument))
        return argument


class Input(NamedTuple):
    """A tensor among the arguments of a recipe."""

    source: Source
    requires_grad: bool


@contextmanager
def _casting(device: str, dtype: torch.dtype | None) -> Iterator[None]:
    """Have operations of this thread cast what they are given to `dtype`, or not at all.

    That is set, not entered: who leaves the outermost `torch.autocast` of a thread drops the casts
    that autocast has kept for all threads, and a forward pass that goes on would make others.
    """
    was_on, kept = _autocasts(device), torch.is_autocast_cache_enabled()
    before = torch.get_autocast_dtype(device)
    try:
        torch.set_autocast_cache_enabled(False)
        torch.set_autocast_enabled(device, dtype is not None)
        torch.set_autocast_dtype(device, before if dtype is None else dtype)
        yield
    finally:
        torch.set_autocast_dtype(device, before)
        torch.set_autocast_enabled(device, was_on)
        torch.set_autocast_cache_enabled(kept)


@contextmanager
def _saving_nothing() -> Iterator[None]:
    """Have hooks that the thread is in see nothing of what is saved, and autograd neither."""
    _push_hooks(_forget, _forget)
    try:
        yield
    finally:
        _pop_hooks()


def _forget(_: Any) -> Any:
    """Return nothing: nobody goes back through this graph."""


def _detached(made: Any) -> Any:
    if isinstance(made, torch.Tensor):
        return made.detach()
    return [one.detach() for one in made]


class Pins:
    """Storages that are known weakly for as long as somebody holds this.

    Whoever drops it last may be any thread, where a signal may strike: they are freed by one who
    finds it dead, from the list, which outlives it.
    """

    __slots__ = ("__weakref__", "storages")

    def __init__(self) -> None:
        self.storages: list[WeakStorage] = []

    def add(self, storage: torch.UntypedStorage) -> WeakStorage:
        """Know one more."""
        pin = WeakStorage(storage)
        self.storages.append(pin)
        return pin


class Result:
    """One storage that a recipe makes. The lock of its step protects it."""

    __slots__ = (
        "__weakref__",
        "_device",
        "_given",
        "_left",
        "_memo",
        "_origin",
        "_pins",
        "_recipe",
        "_uses",
        "_view",
        "is_overwritten",
        "nbytes",
        "original",
    )

    def __init__(self, tensor: torch.Tensor, origin: WeakStorage, pins: Pins) -> None:
        """Stand for `tensor`, whose storage `origin` knows for as long as `pins` are held."""
        self.original: torch.Tensor | None = None
        """The tensor, held as long as its recipe is not known."""
        self.is_overwritten = False
        """Whether its own memory has got other bytes, uncounted."""
        self.nbytes = tensor.untyped_storage().nbytes()
        self._origin = origin
        self._pins = pins
        self._view = View.of(tensor)
        self._device = tensor.device
        self._recipe: tuple[Recipe, int | None] | None = None
        self._memo: tuple[torch.Tensor, int] | None = None
        self._given: list[SavedVersion] = []
        self._uses = 0
        self._left = 0

    @property
    def has_recipe(self) -> bool:
        """Whether it is known how to make it."""
        return self._recipe is not None

    def made_by(self, recipe: Recipe, index: int | None) -> None:
        """Give the tensor up: it is the output `index` of `recipe`, or all of it."""
        self._recipe = recipe, index
        self.original = None
        if index is not None:
            recipe.results.append((weakref.ref(self), index))

    def expect_use(self) -> None:
        """Note that somebody else will ask for it."""
        self._uses += 1
        self._left += 1

    def viewed(self, view: View) -> torch.Tensor:
        """Return a view of its memory: its own while somebody holds that, else what is made anew.

        Its own is what PyTorch would read, whatever has been written to it.

        Raises:
            ActivationLost: an input has changed, or the operation makes something else.
        """
        origin = self._origin.storage()
        if origin is not None and origin.nbytes() == self.nbytes:
            self._asked(None)
            return view.rebuild(origin)
        if self.is_overwritten:
            raise lost("overwritten")
        return self.viewed_anew(view)

    def viewed_anew(self, view: View) -> torch.Tensor:
        """Return a view of what its recipe makes, whatever has become of its memory.

        Raises:
            ActivationLost: an input has changed, or the operation makes something else.
        """
        made = self.made()
        return made if view == self._view else view.rebuild(made.untyped_storage())

    def viewed_for_writing(self, view: View) -> torch.Tensor:
        """Return a view of what its recipe makes, for one who writes to it.

        Raises:
            ActivationLost: an input has changed, or the operation makes something else.
        """
        made = self.made()
        is_alone = self._uses == 1 and _references(made.untyped_storage()) == _ALONE
        return view.rebuild((made if is_alone else copied(made)).untyped_storage())

    def made(self) -> torch.Tensor:
        """Return what the recipe has made, for this one or for one who has asked before.

        Raises:
            ActivationLost: an input has changed, or the operation makes something else.
        """
        if self._recipe is None:
            raise lost("memory")
        stream = _stream(self._device)
        tensor = self._remembered(stream)
        if tensor is None:
            tensor = self._run(*self._recipe)
        self._asked((tensor, stream))
        return tensor

    def _asked(self, made: tuple[torch.Tensor, int] | None) -> None:
        """Remember what was made for whoever else will ask; all of them may ask once more."""
        self._left -= 1
        if self._left > 0:
            self._memo = made
        else:
            self._memo, self._left = None, self._uses
            self._given.clear()

    def given(self, version: SavedVersion) -> None:
        """Note who has been handed the memory, and may change it under that version's counter."""
        if self._memo is not None:
            self._given.append(version)

    def _remembered(self, stream: int) -> torch.Tensor | None:
        """Return what was made before if it is as it was, and there for this stream."""
        if self._memo is None or self._memo[1] != stream:
            return None
        return self._memo[0] if all(version.unchanged for version in self._given) else None

    def _run(self, recipe: Recipe, index: int | None) -> torch.Tensor:
        made = recipe.run()
        for known, place in recipe.results:
            other = known()
            if other is not None and other is not self:
                other._offered(made[place])
        tensor: torch.Tensor = made if index is None else made[index]
        nbytes = tensor.untyped_storage().nbytes()
        if not self._view.describes(tensor) or nbytes != self.nbytes:
            raise lost("layout", (tensor, nbytes, self.nbytes))
        return tensor

    def _offered(self, made: torch.Tensor) -> None:
        """Remember what was made with another result, if somebody will ask for it."""
        if self._left > 0 and self._memo is None and self._view.describes(made):
            self._memo = made, _stream(self._device)
            self._given.clear()


class Replayed:
    """What autograd holds for a tensor that is recomputed."""

    __slots__ = ("checksum", "result", "trial", "version", "view")

    def __init__(
        self,
        result: Result,
        view: View,
        version: SavedVersion,
        *,
        trial: Trial | None = None,
        checksum: torch.Tensor | None = None,
    ) -> None:
        """Stand for a `view` of `result`; `checksum` is that of the tensor itself."""
        self.result = result
        self.view = view
        self.version = version
        self.trial = trial
        self.checksum = checksum
        result.expect_use()


def _references(storage: torch.UntypedStorage) -> int:
    """Return how many tensors lie in a storage, and objects of Python's stand for it."""
    return torch._C._storage_Use_Count(storage._cdata)


_EXAMPLE: Final = torch.empty(1)
_ALONE: Final = _references(_EXAMPLE.untyped_storage())
"""Of a tensor in memory of its own."""


def _stream(device: torch.device) -> int:
    return 0 if device.index is None else torch._C._cuda_getCurrentRawStream(device.index)
