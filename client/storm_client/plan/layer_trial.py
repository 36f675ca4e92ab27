"""Finds out whether a layer's forward may be called a second time, by calling it twice.

Both calls are made in the forward pass, and the first one's result is what goes on. What the first
has changed is seen before the second is made: in the modules, in what it was given, in generators
of random numbers besides PyTorch's. So a layer that does not do the same twice has cost time and
nothing else, unless it hands something on where nobody looks; who goes back through that is told.
"""

from __future__ import annotations

import pickle
import random
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Final, NamedTuple, Never

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from storm_client.errors import ActivationLost
from storm_client.layers import parts_of
from storm_client.plan.layer_graph import uncached_casts
from storm_client.plan.layer_snapshots import (
    NUMBERS,
    RandomStates,
    attributes_of,
    copied,
    is_same,
    own_tensors,
    replaced,
    tensors_in,
    version_of,
)
from storm_client.plan.recipes import checksum
from storm_client.watching import Watching

__all__ = ["Trial", "call_twice"]

_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks

_CHANGES = "its forward changes what its modules hold"
_DRAWS = "it draws random numbers that are not PyTorch's own"

DEPTH: Final = 4
"""So deep what a module's attributes hold is looked through, with the attributes of objects."""

MOST_HELD: Final = 10_000
"""Of what is looked through; a module may refer to a whole data set."""


class Trial(NamedTuple):
    """What calls of a layer have shown."""

    made: Any
    """By the first of them."""
    difference: str
    """What another did otherwise; empty where it did the same."""
    needs_no_graph: bool = False
    """Whether one that recorded nothing did the same too, and left nothing."""


def call_twice(
    module: torch.nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    name: str = "",
    unseen_by: TorchFunctionMode | None = None,
) -> Trial:
    """Call a module's `forward`, and again unless the first call shows that it would differ.

    The second call has a graph of its own, and the mode `unseen_by` sees nothing of it. What it
    raises is a difference; who goes back through its graph is told so, with the `name` of the
    module. Where it does the same, a third is made without a graph.
    """
    tensors, parts = tensors_in((*args, *kwargs.values())), list(parts_of([module]))
    given = copied((args, kwargs))
    versions = list(map(version_of, tensors))
    held, outside = _Held(parts), _Outside(parts)
    randomness = RandomStates(tensors)
    first = _Checksums()
    with first.past_hooks(), first:
        made = forward(*args, **kwargs)
    is_written_to = list(map(version_of, tensors)) != versions
    if is_written_to or not _is_same_given((args, kwargs), given):
        return Trial(made, "it changes what it is given")
    if _Held(parts) != held:
        return Trial(made, _CHANGES)
    if difference := _DRAWS if first.has_generators else outside.difference(_Outside(parts)):
        return Trial(made, difference)
    apart = {id(t): t.detach().requires_grad_(t.requires_grad) for t in tensors}
    again = partial(forward, *replaced(args, apart), **replaced(kwargs, apart))
    known = [*own_tensors(parts), *apart.values()]
    complain = partial(_is_no_result, name)
    hooks, second = saved_tensors_hooks(_nothing, complain), _Checksums(complain)
    needs_no_graph = False
    try:
        with _Unseen(unseen_by), hooks, randomness.again(), second:
            again()
        is_same = first.equals(second)
        if is_same and not second.outlived(known):
            with _Unseen(unseen_by), randomness.again():
                needs_no_graph = _is_same_without_graph(again, first, known)
    except Exception as error:  # noqa: BLE001 - nobody has asked for this call, so it may not raise
        return Trial(made, f"its second call failed: {type(error).__name__}: {error}")
    if _Held(parts) != held:
        return Trial(made, _CHANGES)
    return Trial(made, "" if is_same else "called twice it had other bits", needs_no_graph)


def _is_same_without_graph(
    call: Callable[[], Any], first: _Checksums, known: Iterable[torch.Tensor]
) -> bool:
    """Tell whether a call that records nothing does what the first did, and leaves nothing.

    What it left would be where gradients go on from, and would have none. The tensors `known` were
    there before it.
    """
    found = _Checksums()
    try:
        with torch.no_grad(), uncached_casts(), found:
            call()
        return not found.outlived(known) and first.equals(found)
    except Exception:  # noqa: BLE001 - with a graph it may do
        return False


class _Unseen:
    """A context in which functions do not pass through `mode`, where that is the innermost."""

    def __init__(self, mode: TorchFunctionMode | None) -> None:
        count = torch._C._len_torch_function_stack()
        is_innermost = count > 0 and torch._C._get_function_stack_at(count - 1) is mode
        self._mode = mode if is_innermost else None

    def __enter__(self) -> None:
        if self._mode is not None:
            torch._C._pop_torch_function_stack()

    def __exit__(self, *_: object) -> None:
        if self._mode is not None:
            torch._C._push_on_torch_function_stack(self._mode)


class _Outside:
    """What a forward may change outside of its modules, and a second call would once more.

    Random numbers of Python, NumPy and generators that modules hold are not drawn again in the
    backward pass, and another process of a group may not call its layers twice.
    """

    def __init__(self, parts: Iterable[torch.nn.Module]) -> None:
        numpy = sys.modules.get("numpy.random")
        self._random = [
            random.getstate(),
            None if numpy is None else pickle.dumps(numpy.get_state()),
            *(_random_state(value) for part in parts for value in part.__dict__.values()),
        ]
        self._collectives = _collectives()

    def difference(self, later: _Outside) -> str:
        """Return what has been changed; empty where nothing was."""
        if self._collectives != later._collectives:
            return "it exchanges something with other processes"
        if self._random != later._random:
            return _DRAWS
        return ""


def _random_state(value: object) -> object:
    """Return the state of a generator; None for anything else."""
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, random.Random):
        return value.getstate()
    numpy = sys.modules.get("numpy.random")
    if numpy is not None and isinstance(value, (numpy.Generator, numpy.RandomState)):
        return pickle.dumps(value)
    return None


def _collectives() -> list[int]:
    """Return how many collectives each group of processes has begun."""
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    if distributed is None or not distributed.is_initialized():
        return []
    return [group._get_sequence_number_for_group() for group in distributed._world.pg_map]


class _Checksums(Watching):
    """Takes a checksum of each tensor that PyTorch's functions return."""

    def __init__(self, hook: Callable[[torch.Tensor], Never] | None = None) -> None:
        """Have `hook` be told where somebody goes back through what is made from here on."""
        super().__init__()
        self._hook = hook
        self._first = torch._C._autograd._get_sequence_nr()
        self._found: list[torch.Tensor] = []
        self._living: list[weakref.ref[torch.Tensor]] = []
        self._error: Exception | None = None
        self._is_in_hook = False
        self.has_generators = False
        """Whether functions were given generators that are not PyTorch's own."""

    def past_hooks(self) -> AbstractContextManager[object]:
        """Return a context in which what the innermost hooks do is not noted.

        A custom function's tensors are saved outside of any function that this mode has called.
        """
        top = _top_hooks(True)
        if top is None:
            return nullcontext()
        pack, unpack = top

        def unseen(tensor: torch.Tensor) -> Any:
            before, self._is_in_hook = self._is_in_hook, True
            try:
                return pack(tensor)
            finally:
                self._is_in_hook = before

        return saved_tensors_hooks(unseen, unpack)

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the function and note what it returned."""
        made = function(*args, **(kwargs or {}))
        if kwargs and not self.has_generators:
            self.has_generators = _is_generator_of_its_own(kwargs.get("generator"))
        if self._is_in_hook or function in _UNWRITTEN:
            return made
        with torch._C.DisableTorchFunction(), torch.no_grad():
            for tensor in made if isinstance(made, (tuple, list)) else (made,):
                if type(tensor) is torch.Tensor and self._error is None:
                    self._note(tensor)
        return made

    def _note(self, tensor: torch.Tensor) -> None:
        """Note a tensor; what keeps that from being done is raised where both are compared."""
        self._living.append(weakref.ref(tensor))
        try:
            node = tensor.grad_fn
            if self._hook is not None and node is not None and node._sequence_nr() >= self._first:
                tensor.register_hook(self._hook)  # type: ignore[no-untyped-call]
            tensor = _unwrapped(tensor)
            if tensor.layout is torch.strided and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                if tensor.nbytes < storage.nbytes():  # nobody may have written to the rest
                    storage = tensor.clone(memory_format=torch.contiguous_format).untyped_storage()
                if storage.nbytes():
                    self._found.append(checksum(storage))
        except Exception as error:  # noqa: BLE001 - the user's own call may be under way
            self._error = error

    def equals(self, other: _Checksums) -> bool:
        """Tell whether both have seen the same; waits for the device.

        Raises:
            Exception: that of one could not be told.
        """
        for error in (self._error, other._error):
            if error is not None:
                raise error
        if len(self._found) != len(other._found):
            return False
        return all(map(torch.equal, self._found, other._found))

    def outlived(self, known: Iterable[torch.Tensor]) -> bool:
        """Tell whether something that functions have returned lives, besides what was `known`."""
        ids = set(map(id, known))
        living = (reference() for reference in self._living)
        return any(tensor is not None and id(tensor) not in ids for tensor in living)


def _is_generator_of_its_own(value: object) -> bool:
    """Tell whether that is a generator from which random numbers are not drawn once more."""
    if not isinstance(value, torch.Generator) or value is torch.default_generator:
        return False
    return value not in torch.cuda.default_generators


_UNWRITTEN: Final = {
    torch.empty,
    torch.empty_like,
    torch.empty_strided,
    torch.Tensor.new_empty,
    torch.Tensor.new_empty_strided,
}
"""What returns memory with any bits."""


def _unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return what a transform of torch.func has wrapped, which has no memory itself."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


class _Held:
    """What modules hold, and what that holds: the objects, and the versions of tensors."""

    def __init__(self, parts: Iterable[torch.nn.Module]) -> None:
        self._found: list[object] = []
        self._met: set[int] = set()
        for part in parts:
            for name, value in attributes_of(part).items():
                self._found.append(name)
                self._look(value, DEPTH)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Held) or len(self._found) != len(other._found):
            return False
        return all(
            one is two or (isinstance(one, NUMBERS) and is_same(one, two))
            for one, two in zip(self._found, other._found, strict=True)
        )

    __hash__ = None  # type: ignore[assignment]  # it is compared alone

    def _look(self, value: Any, depth: int) -> None:
        self._found.append(value)
        if isinstance(value, torch.Tensor):
            self._found += (version_of(value), value.requires_grad)
        elif depth and id(value) not in self._met and len(self._found) < MOST_HELD:
            self._met.add(id(value))
            for held in _held_by(value):
                self._look(held, depth - 1)


def _held_by(value: Any) -> Iterable[object]:
    """Return what a container or a simple object holds."""
    if isinstance(value, dict):
        return (*value, *value.values())
    if isinstance(value, (list, tuple, set)):
        return tuple(value)
    if isinstance(value, (torch.nn.Module, type, torch.Generator)) or callable(value):
        return ()
    return tuple(getattr(value, "__dict__", {}).values())


def _is_same_given(argument: Any, before: Any) -> bool:
    """Tell whether an argument holds the same as its copy."""
    if type(argument) is dict and type(before) is dict:
        return argument.keys() == before.keys() and all(
            _is_same_given(value, before[name]) for name, value in argument.items()
        )
    if type(argument) in (tuple, list) and type(argument) is type(before):
        return len(argument) == len(before) and all(map(_is_same_given, argument, before))
    return argument is before


def _nothing(_: object) -> Any:
    """Stand in for what a graph saves that nobody goes back through.

    One that returned the tensor would have results hold themselves, for ever.
    """


def _is_no_result(name: str, _: object) -> Never:
    """Say why nobody can go back through what a second call has made."""
    raise ActivationLost(
        f"{name} was called twice in this step, to find out whether the backward pass may call it "
        "again, and the loss depends on what the second call has handed on where nobody sees it, "
        "as in a global list; pass offload(..., layers=[]), or have its forward return that"
    )
