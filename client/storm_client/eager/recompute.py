"""Recomputes values: a recipe runs the operation that made a value again, on the same inputs.

A recipe is made right after its operation has run, while its inputs are available. `sources.py`
defines how they are held. A result holds its recipe, and the recipe its inputs. So a result that
autograd still holds can be recomputed, and everything is freed with it.

A recomputed tensor is held for as long as another request for it is expected.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from storm_client.eager.bits import copied
from storm_client.eager.function_modes import are_altered, unaltered
from storm_client.eager.operations import Function, bound, choice_of
from storm_client.eager.settings import differing_settings, settings_of_kernels
from storm_client.eager.sources import PrivateCopy, Source, check_input, lost
from storm_client.eager.ways import NO_WAY, Way
from storm_client.saved.ranges import WeakStorage
from storm_client.saved.versions import SavedVersion, View

if TYPE_CHECKING:
    from storm_client.eager.proofs import Trial
    from storm_client.native import _follow

__all__ = [
    "Input",
    "OverwrittenResult",
    "Pins",
    "Recipe",
    "RecipeResult",
    "Replayed",
    "Result",
]

_AS_IT_IS = nullcontext()
_autocasts = torch.is_autocast_enabled
_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class Recipe:
    """One operation that was run, with everything that decides its result."""

    __slots__ = (
        "_arguments",
        "_autocast",
        "_choice",
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

        `draw` holds the random numbers that it has drawn; None for none. Without `casts` autocast
        was off when it ran, whatever it is now.
        """
        self.results: list[tuple[weakref.ref[Result], int]] = []
        """If it has several outputs: their results, with their places among the outputs."""
        self._draw = draw
        self._function = function
        self._arguments = arguments
        self._options = options
        self._device = device
        is_on = casts and _autocasts(device)
        self._autocast = torch.get_autocast_dtype(device) if is_on else None
        """The dtype that autocast casts to; None where it was off."""
        self._choice = choice_of(function)
        self._settings = settings_of_kernels(device, self._choice)
        self._differentiates = bool(self._choice) and torch.is_grad_enabled()
        """Whether the choice of its kernels may have depended on which inputs need a gradient."""

    def run(self) -> Any:
        """Run the operation again; its results are part of no graph.

        Raises:
            ActivationLost: it would make other bits now.
        """
        if self._settings != settings_of_kernels(self._device, self._choice):
            raise lost("settings", differing_settings(self._device, self._choice, self._settings))
        arguments = [self._filled(argument) for argument in self._arguments]
        options = {name: self._filled(value) for name, value in self._options.items()}
        records = self._differentiates
        # In a backward pass there is mostly nothing to change, and a check is cheaper.
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
    """Make operations of this thread cast their arguments to `dtype`, or not at all if None.

    The state is set directly. Leaving a thread's outermost `torch.autocast` would clear autocast's
    cache for all threads, and a forward pass in progress would make new casts.
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
    """Keep saved tensors from autograd and from the thread's current hooks."""
    _push_hooks(_forget, _forget)
    try:
        yield
    finally:
        _pop_hooks()


def _forget(_: Any) -> Any:
    """Return None: no backward pass runs through this graph."""


def _detached(made: Any) -> Any:
    if isinstance(made, torch.Tensor):
        return made.detach()
    return [one.detach() for one in made]


class Pins:
    """Weak references to storages, valid for as long as this object is held.

    Any thread may drop the last reference to this object, and a signal may interrupt it. So the
    weak storages are not freed then. A later step frees them from the list, which outlives the
    object.
    """

    __slots__ = ("__weakref__", "storages")

    def __init__(self) -> None:
        self.storages: list[WeakStorage] = []

    def add(self, storage: torch.UntypedStorage) -> WeakStorage:
        """Add a weak reference to a storage."""
        pin = WeakStorage(storage)
        self.storages.append(pin)
        return pin


class Result:
    """One storage that a recipe makes. The lock of the result's step protects it."""

    __slots__ = (
        "__weakref__",
        "_device",
        "_memo",
        "_origin",
        "_pins",
        "_protected",
        "_recipe",
        "_remaining_uses",
        "_unpacked",
        "_users",
        "_uses",
        "_view",
        "is_overwritten",
        "nbytes",
        "needs_proof",
        "original",
        "way",
    )

    def __init__(self, tensor: torch.Tensor, origin: WeakStorage, pins: Pins) -> None:
        """Represent `tensor`; `origin` refers weakly to its storage while `pins` are held."""
        self.original: torch.Tensor | None = None
        """The tensor, held as long as its recipe is not known, and after `hold`."""
        self.way = NO_WAY
        """The way in which its recipe recomputes it; NO_WAY as long as that is not known."""
        self.is_overwritten = False
        """Whether its own memory was modified uncounted."""
        self.needs_proof = False
        """Whether its recipe must be proved: it was saved, perhaps without a trial, while another
        step signature was expected."""
        self.nbytes = tensor.untyped_storage().nbytes()
        self._origin = origin
        self._pins = pins
        self._view = View.of(tensor)
        self._device = tensor.device
        self._recipe: tuple[Recipe, int | None] | None = None
        self._memo: tuple[torch.Tensor, _Pass] | None = None
        """The recomputed tensor, for further requests of the same backward pass: by the next one
        its inputs may have changed, so a trial must recompute it then."""
        self._unpacked: tuple[WeakStorage, int] | None = None
        """The recomputed storage that autograd got last, and the stream on which it was made."""
        self._protected: PrivateCopy | None = None
        """Without a recipe: a copy that recipes read, since its own memory may be written to."""
        self._users: list[SavedVersion] = []
        self._uses = 0
        self._remaining_uses = 0

    @property
    def has_recipe(self) -> bool:
        """Whether a recipe for it is known."""
        return self._recipe is not None

    def made_by(self, recipe: Recipe, index: int | None, way: Way) -> None:
        """Set the recipe and drop the tensor: it is output `index` of `recipe`, or its only one."""
        self._recipe, self.way = (recipe, index), way
        self.original = None
        if index is not None:
            recipe.results.append((weakref.ref(self), index))

    def hold(self) -> None:
        """Hold its own memory if somebody holds it: a backward pass reads it as it is then.

        Called where the step has turned out to be of another signature.
        """
        self.needs_proof |= self._recipe is None
        origin = self._origin.storage()
        if origin is not None:
            self.original = self._view.rebuild(origin)

    def expect_use(self) -> None:
        """Count one more expected request for it."""
        self._uses += 1
        self._remaining_uses += 1

    def unpacked(self, view: View, version: SavedVersion) -> torch.Tensor:
        """Return a tensor that autograd saved at a version, as a view of its own memory if held.

        That is what PyTorch would read, whatever has been written to it. Otherwise the memory is
        recomputed. As long as a backward pass holds what it got before, it gets the same memory
        again: it may write to one of its saved tensors and read another.

        Raises:
            ActivationLost: an input has changed, or the operation makes something else.
        """
        stream, storage = _stream(self._device), self._original_storage()
        if storage is None and self._unpacked is not None and self._unpacked[1] == stream:
            storage = self._unpacked[0].storage()
        if storage is not None:
            self._note_request(self._memo)
            return version.alias(view.rebuild(storage))
        tensor = self.viewed(view)
        self._unpacked = self._pins.add(tensor.untyped_storage()), stream
        self.add_user(version)
        return version.alias(tensor)

    def protect(self, tensor: torch.Tensor) -> None:
        """Have recipes read a copy of `tensor`, which was returned to somebody who may write to it.

        Without this, recipes would read what autograd got: the memory remembered for them, or its
        own.
        """
        storage = tensor.untyped_storage()._cdata
        if self._memo is not None and self._memo[0].untyped_storage()._cdata == storage:
            self._memo = copied(self._memo[0]), self._memo[1]
            self._users.clear()
        if not self.has_recipe and self._uses > 1 and self.is_own_memory(tensor):
            self._protected = PrivateCopy(tensor)

    def is_own_memory(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor that was returned lies in the result's own memory."""
        return bool(tensor.untyped_storage()._cdata == self._origin.address)

    def _original_storage(self) -> torch.UntypedStorage | None:
        """Return its own memory if that is held; `ActivationLost` if it was overwritten then."""
        origin = self._origin.storage()
        if origin is not None and origin.nbytes() == self.nbytes:
            return origin
        if self.is_overwritten:
            raise lost("overwritten")
        return None

    def viewed(self, view: View) -> torch.Tensor:
        """Return a view of the recomputed memory; of its own, if that is held, without a recipe.

        Its own memory may be written to without a version counting it, so it is read only then.

        Raises:
            ActivationLost: an input has changed, or the operation makes something else.
        """
        origin = None
        if self._protected is not None:
            origin = self._protected.tensor().untyped_storage()
        elif not self.has_recipe:
            origin = self._original_storage()
        if origin is not None:
            self._note_request(None)
            return view.rebuild(origin)
        made = self.made()
        return made if view == self._view else view.rebuild(made.untyped_storage())

    def viewed_for_writing(self, view: View) -> torch.Tensor:
        """Return a view of the recomputed memory, for a caller that writes to it.

        Raises:
            ActivationLost: an input has changed, or the operation makes something else.
        """
        made = self.made()
        is_alone = self._uses == 1 and _references(made.untyped_storage()) == _ALONE
        return view.rebuild((made if is_alone else copied(made)).untyped_storage())

    def tried(self) -> torch.Tensor:
        """Return the recomputed tensor, as `unpacked` does when its own memory is not held.

        Raises:
            ActivationLost: as `unpacked`.
        """
        if self.is_overwritten:
            raise lost("overwritten")
        return self.made()

    def made(self) -> torch.Tensor:
        """Return the recomputed tensor, made now or for an earlier request.

        Raises:
            ActivationLost: an input has changed, or the operation makes something else.
        """
        if self._recipe is None:
            raise lost("memory")
        now = _pass(self._device)
        tensor = self._remembered(now)
        if tensor is None:
            tensor = self._run(*self._recipe)
        self._note_request((tensor, now))
        return tensor

    def _note_request(self, made: tuple[torch.Tensor, _Pass] | None) -> None:
        """Remember the tensor for the expected requests; after the last, expect all once more."""
        self._remaining_uses -= 1
        if self._remaining_uses > 0:
            self._memo = made
        else:
            self._memo, self._remaining_uses = None, self._uses
            self._users.clear()

    def add_user(self, version: SavedVersion) -> None:
        """Record a user of the recomputed memory, who may modify it, as `version` then shows."""
        if self._memo is not None:
            self._users.append(version)

    def _remembered(self, now: _Pass) -> torch.Tensor | None:
        """Return the remembered tensor if it is unmodified and was made in this pass."""
        if self._memo is None or self._memo[1] != now:
            return None
        return self._memo[0] if all(version.unchanged for version in self._users) else None

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
        """Remember an output made along with another result, if a request for it is expected."""
        now = _pass(self._device)
        is_expected = self._remaining_uses > 0 and self._remembered(now) is None
        if is_expected and self._view.describes(made):
            self._memo = made, now
            self._users.clear()


class RecipeResult(NamedTuple):
    """A view of another recipe's result, at a version."""

    result: Result
    view: View
    version: SavedVersion

    def tensor(self) -> torch.Tensor:
        """Return the tensor; see `Result.viewed`."""
        if not self.result.has_recipe:
            check_input(self.version)
        return self.result.viewed(self.view)


class OverwrittenResult(NamedTuple):
    """The same for an operation that writes to the result: nobody else holds the memory."""

    result: Result
    view: View

    def tensor(self) -> torch.Tensor:
        """Recompute the result from its inputs, since its own memory was overwritten."""
        return self.result.viewed_for_writing(self.view)

    @classmethod
    def over(cls, result: Result, tensor: torch.Tensor) -> OverwrittenResult:
        """Represent the value of `tensor` before it was overwritten."""
        result.is_overwritten = True
        result.expect_use()
        return cls(result, View.of(tensor))


class Replayed:
    """The object that autograd holds in place of a tensor to be recomputed."""

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
        """Represent a `view` of `result`; `checksum` is that of the tensor's original storage."""
        self.result = result
        self.view = view
        self.version = version
        self.trial = trial
        self.checksum = checksum
        result.expect_use()


def _references(storage: torch.UntypedStorage) -> int:
    """Return the number of tensors and Python objects that refer to a storage."""
    return torch._C._storage_Use_Count(storage._cdata)


_EXAMPLE: Final = torch.empty(1)
_ALONE: Final = _references(_EXAMPLE.untyped_storage())
"""The number of references to the storage of a single tensor."""


class _Pass(NamedTuple):
    """A backward pass's work on one stream."""

    stream: int
    backward: int
    """The number of the backward pass; -1 outside of all."""


def _pass(device: torch.device) -> _Pass:
    return _Pass(_stream(device), torch._C._current_graph_task_id())


def _stream(device: torch.device) -> int:
    return 0 if device.index is None else torch._C._cuda_getCurrentRawStream(device.index)
