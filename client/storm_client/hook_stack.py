"""The `with` blocks of an Offload: they put hooks on PyTorch's stack and take them off again.

An ordinary `__exit__` is not enough for that. Python looks for signals when a function written in
Python begins, so Ctrl-C may raise before its first line, and the hooks would stay on. But the
interpreter holds what `__exit__` was looked up as, from before `__enter__` is called until the
block is left, and drops it in any case. So that object is one of its own for each block, and hooks
that are still on go with its death, by a callback in which no Python code runs.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from operator import call, is_, methodcaller
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from storm_client.errors import UsageError

__all__ = [
    "Blocks",
    "Entered",
    "Leaving",
    "Stacks",
    "function_modes",
    "have_modes",
    "innermost",
    "untraced",
]

Function = TypeVar("Function", bound=Callable[..., Any])

_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_push_mode = torch._C._push_on_torch_function_stack
_pop_mode = torch._C._pop_torch_function_stack


def untraced(function: Function) -> Function:
    """Have torch.compile run a function, and all that it calls, as they are.

    A compiled module runs its backward, and what lies between its graphs, with Dynamo looking at
    every frame; one that asks for a whole graph around a block is told that this cannot be.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    function.__dict__["_torchdynamo_disable"] = True
    return function


class Stacks:
    """What this thread has on PyTorch's stacks, so that it can be so again after an exception.

    A `with` statement takes off what it has put on, unless an interrupt comes before the first line
    of an `__exit__` or behind the last of an `__enter__`. For that, restore in an `except` clause
    around it.
    """

    __slots__ = ("_hooks", "_is_recording", "_modes")

    def __init__(self) -> None:
        """Note the present."""
        self._hooks = _top_hooks(True)
        self._is_recording = torch.is_grad_enabled()
        self._modes = function_modes()

    def restore(self) -> None:
        """Have hooks, function modes and the recording of gradients be as they were."""
        while (top := _top_hooks(True)) is not None and top != self._hooks:
            _pop_hooks()
        modes = function_modes()
        if not (len(modes) == len(self._modes) and all(map(is_, modes, self._modes))):
            have_modes(self._modes)
        torch._C._set_grad_enabled(self._is_recording)


def function_modes() -> list[Any]:
    """Return what PyTorch's functions pass through in this thread, the innermost last."""
    count = torch._C._len_torch_function_stack()
    return [torch._C._get_function_stack_at(index) for index in range(count)]


def have_modes(modes: list[Any]) -> None:
    """Have PyTorch's functions pass through these in this thread, the innermost last."""
    for _ in range(torch._C._len_torch_function_stack()):
        _pop_mode()
    for mode in modes:
        _push_mode(mode)


def innermost() -> Any:
    """Return what this thread's innermost hooks are methods of, if of anything."""
    top = _top_hooks(True)
    owner = None if top is None else getattr(top[0], "__self__", None)
    return getattr(owner, "owner", owner)  # compiled hooks have one that is written in Python


class Watcher(Protocol):
    """Compiled code that looks at a thread's calls; both functions are written in C."""

    def watch(self) -> None:
        """Look at what this thread calls from now on."""
        ...

    def unwatch(self) -> None:
        """Look at nothing any more that it calls; does nothing where that is so."""
        ...


class Entered(Protocol):
    """What a block is for."""

    def end(self) -> None:
        """Note that the block has ended, and by no exception."""
        ...

    def abandon(self) -> None:
        """Note that an exception has ended the block."""
        ...

    @property
    def hooks(self) -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
        """What returns what autograd is to hold instead of a tensor, and the tensor for that."""
        ...

    @property
    def mode(self) -> TorchFunctionMode | None:
        """What PyTorch's functions pass through in the block."""
        ...

    @property
    def watchers(self) -> Sequence[Watcher]:
        """What looks at the operators that are called in the block."""
        ...


class _Guard(weakref.ref["partial[None]"]):
    """Of what ends a block: takes the hooks off if that dies first. Drop the guard to disarm it."""

    __slots__ = ()
    pop = _pop_hooks


class _ModeGuard(weakref.ref["partial[None]"]):
    """The same for the block's mode."""

    __slots__ = ()
    pop = _pop_mode


class _WatcherGuard(weakref.ref["partial[None]"]):
    """The same for what looks at the block's calls."""

    __slots__ = ("pop",)
    pop: Callable[[], object]


class _Block:
    """One entry, from before its hooks are on until they are off."""

    __slots__ = ("entered", "guard", "mode", "mode_guard", "pops", "watcher_guards")

    def __init__(self, entered: Entered, *pops: Callable[[], object]) -> None:
        self.entered = entered
        self.guard: _Guard | None = None
        self.mode: TorchFunctionMode | None = None
        self.mode_guard: _ModeGuard | None = None
        self.watcher_guards: tuple[_WatcherGuard, ...] = ()
        self.pops = pops
        """What takes off what the block has put on, called one after the other without Python."""


class Blocks(threading.local):
    """The blocks of one context manager in each thread."""

    def __init__(self) -> None:
        """Begin outside of all."""
        self._leaving: weakref.ref[partial[None]] | None = None
        self._unguarded: list[_Block] = []
        """Those entered by a plain call of `__enter__`, which a plain call has to leave."""

    def leaving(self, leave: partial[None]) -> None:
        """Note what will end the block that is entered next."""
        self._leaving = weakref.ref(leave)

    def enter(self, entered: Entered) -> None:
        """Put the hooks of `entered` on."""
        hooks, mode = entered.hooks, entered.mode
        watchers = entered.watchers
        unwatches = [watcher.unwatch for watcher in watchers]
        pops = (_pop_hooks,) if mode is None else (_pop_mode, _pop_hooks)
        block = _Block(entered, *unwatches, *pops)
        block.mode = mode
        leave = None if self._leaving is None else self._leaving()
        self._leaving = None
        try:
            _push_hooks(*hooks)
            if mode is not None:
                _push_mode(mode)
            for watcher in watchers:
                watcher.watch()
            if leave is None:
                self._unguarded.append(block)
            else:
                leave.args[1].append(block)
                if mode is not None:
                    block.mode_guard = _ModeGuard(leave, _TAKE_OFF)
                for unwatch in unwatches:
                    guard = _WatcherGuard(leave, _TAKE_OFF)
                    guard.pop = unwatch
                    block.watcher_guards = (*block.watcher_guards, guard)
                block.guard = _Guard(leave, _TAKE_OFF)
        except BaseException:
            block.guard = block.mode_guard = None
            block.watcher_guards = ()
            for unwatch in unwatches:
                unwatch()
            if mode is not None and _is_on(mode):
                _pop_mode()
            top = _top_hooks(True)
            if top is not None and top[0] is hooks[0]:
                _pop_hooks()
            raise

    def leave(self, blocks: list[_Block], kind: type[BaseException] | None) -> None:
        """Take the hooks of the block off, and tell it unless an exception has ended it.

        Raises:
            UsageError: this thread is in no such block. Its hooks are as they were.
        """
        entered = blocks or self._unguarded
        if not entered:
            raise UsageError(
                "an offload block was left that this thread is not in; leave it once, in the "
                "thread that entered it: PyTorch's hooks are a thread's own"
            )
        block = entered[-1]
        if block.mode is not None and not _is_on(block.mode):
            _take_out(block.mode)
            block.pops = tuple(pop for pop in block.pops if pop is not _pop_mode)
        pops = map(call, block.pops)
        # No signal is looked for between these, which call nothing, and the end of the call.
        block.guard = block.mode_guard = None
        block.watcher_guards = ()
        del entered[-1]
        deque(pops, 0)
        if kind is None:
            block.entered.end()
        else:
            block.entered.abandon()


def _is_on(mode: TorchFunctionMode) -> bool:
    count = torch._C._len_torch_function_stack()
    return count > 0 and torch._C._get_function_stack_at(count - 1) is mode


def _take_out(mode: TorchFunctionMode) -> None:
    """Have a mode not be on the stack, of which it is not the top.

    PyTorch takes it off while it runs, and an interrupt may strike before that is sure to be
    undone; so may one that keeps another's mode there.
    """
    modes = function_modes()
    if any(one is mode for one in modes):
        have_modes([one for one in modes if one is not mode])


_TAKE_OFF = methodcaller("pop")


class HasBlocks(Protocol):
    """A context manager whose `__enter__` calls `blocks.enter`."""

    blocks: Blocks


Manager = TypeVar("Manager", bound=HasBlocks)


class Leaving(Generic[Manager]):
    """The `__exit__` of a context manager: each look-up makes an object of its own."""

    def __get__(self, manager: Manager | None, owner: type[Manager]) -> Callable[..., None]:
        """Return what ends the block that is entered next."""
        if manager is None:
            return _leave_unguarded
        leave = partial(_leave, manager, [])
        manager.blocks.leaving(leave)
        return leave


@untraced
def _leave(
    manager: HasBlocks, blocks: list[_Block], kind: type[BaseException] | None, *_: object
) -> None:
    manager.blocks.leave(blocks, kind)


@untraced
def _leave_unguarded(
    manager: HasBlocks, kind: type[BaseException] | None = None, *_: object
) -> None:
    manager.blocks.leave([], kind)
