"""The `with` blocks of an Offload: they push hooks on PyTorch's stack and pop them again.

An ordinary `__exit__` is not enough. Python checks for signals when a function written in Python
begins, so Ctrl-C may raise before the first line of `__exit__`, and the hooks would stay on the
stack. But the interpreter looks `__exit__` up before it calls `__enter__`, holds the result until
the block ends, and drops it in any case. So each look-up returns a new object. When this object is
freed, a weak reference's callback, in which no Python code runs, pops the hooks that are still on
the stack.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from operator import call, is_, methodcaller
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from storm_client.errors import UsageError

__all__ = [
    "BlockExit",
    "Blocks",
    "Stacks",
    "Watcher",
    "function_modes",
    "innermost",
    "set_modes",
    "untraced",
]

Function = TypeVar("Function", bound=Callable[..., Any])

_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_push_mode = torch._C._push_on_torch_function_stack
_pop_mode = torch._C._pop_torch_function_stack


def untraced(function: Function) -> Function:
    """Make torch.compile run a function, and all functions that it calls, uncompiled.

    Dynamo looks at every frame of a compiled module's backward pass, and between its graphs. A user
    who asks for one whole graph around a block gets Dynamo's error.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    function.__dict__["_torchdynamo_disable"] = True
    return function


class Stacks:
    """Notes a thread's state on PyTorch's stacks and restores it after an exception.

    A `with` statement pops what it has pushed, unless an interrupt comes before the first line of
    an `__exit__` or after the last line of an `__enter__`. For that case, call `restore` in an
    `except` clause around the statement.
    """

    __slots__ = ("_hooks", "_is_recording", "_modes")

    def __init__(self) -> None:
        """Note the present state."""
        self._hooks = _top_hooks(True)
        self._is_recording = torch.is_grad_enabled()
        self._modes = function_modes()

    def restore(self) -> None:
        """Restore the hooks, the function modes and whether gradients are recorded."""
        while (top := _top_hooks(True)) is not None and top != self._hooks:
            _pop_hooks()
        modes = function_modes()
        if not (len(modes) == len(self._modes) and all(map(is_, modes, self._modes))):
            set_modes(self._modes)
        torch._C._set_grad_enabled(self._is_recording)


def function_modes() -> list[Any]:
    """Return this thread's stack of PyTorch function modes, the innermost last."""
    count = torch._C._len_torch_function_stack()
    return [torch._C._get_function_stack_at(index) for index in range(count)]


def set_modes(modes: list[Any]) -> None:
    """Replace this thread's stack of PyTorch function modes; the innermost is last."""
    for _ in range(torch._C._len_torch_function_stack()):
        _pop_mode()
    for mode in modes:
        _push_mode(mode)


def innermost() -> Any:
    """Return the object whose methods this thread's innermost hooks are, or None."""
    top = _top_hooks(True)
    owner = None if top is None else getattr(top[0], "__self__", None)
    return getattr(owner, "owner", owner)  # compiled hooks have an owner written in Python


Hooks: TypeAlias = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""The pack hook (tensor to autograd's object) and the unpack hook (object to tensor)."""


class Watcher(Protocol):
    """Compiled code that watches a thread's calls. Its methods are written in C."""

    def watch(self) -> None:
        """Start watching."""

    def unwatch(self) -> None:
        """Stop watching; do nothing if it is not watching."""


class Entered(Protocol):
    """What a block pushes, and is told at its end."""

    @property
    def hooks(self) -> Hooks:
        """Its hooks."""

    @property
    def mode(self) -> TorchFunctionMode | None:
        """Its function mode, if it has one."""

    @property
    def watchers(self) -> Sequence[Watcher]:
        """What watches the block's calls."""

    def end(self) -> object:
        """The block has ended."""

    def abandon(self) -> None:
        """An exception has ended the block."""


class Manager(Protocol):
    """A context manager with such blocks."""

    @property
    def blocks(self) -> Blocks:
        """Its blocks in each thread."""


class _Guard(weakref.ref["partial[None]"]):
    """Pops the hooks when the block's exit object is freed. Drop the guard to disarm it."""

    __slots__ = ()
    pop = _pop_hooks


class _ModeGuard(weakref.ref["partial[None]"]):
    """Pops the block's function mode when the block's exit object is freed."""

    __slots__ = ()
    pop = _pop_mode


class _WatcherGuard(weakref.ref["partial[None]"]):
    """Stops one of the block's watchers when the block's exit object is freed."""

    __slots__ = ("pop",)
    pop: Callable[[], object]


class _Block:
    """One entry of a `with` block, from before its hooks are pushed until they are popped."""

    __slots__ = ("entered", "guard", "mode", "mode_guard", "pops", "watcher_guards")

    def __init__(self, entered: Entered, *pops: Callable[[], object]) -> None:
        self.entered = entered
        self.guard: _Guard | None = None
        self.mode: TorchFunctionMode | None = None
        self.mode_guard: _ModeGuard | None = None
        self.watcher_guards: tuple[_WatcherGuard, ...] = ()
        self.pops = pops
        """Functions that undo the block's pushes, called in this order without Python between."""


class Blocks(threading.local):
    """The blocks of one context manager in each thread."""

    def __init__(self) -> None:
        """Start outside of all blocks."""
        self._next_exit: weakref.ref[partial[None]] | None = None
        self._unguarded: list[_Block] = []
        """Blocks entered by a direct call of `__enter__`; a direct call of `__exit__` ends them."""

    def note_exit(self, exit_call: partial[None]) -> None:
        """Note `exit_call`, the object that will end the next block."""
        self._next_exit = weakref.ref(exit_call)

    def enter(self, entered: Entered) -> None:
        """Push the hooks and the mode of `entered`, and start its watchers."""
        hooks, mode = entered.hooks, entered.mode
        watchers = entered.watchers
        unwatches = [watcher.unwatch for watcher in watchers]
        pops = (_pop_hooks,) if mode is None else (_pop_mode, _pop_hooks)
        block = _Block(entered, *unwatches, *pops)
        block.mode = mode
        exit_call = None if self._next_exit is None else self._next_exit()
        self._next_exit = None
        try:
            _push_hooks(*hooks)
            if mode is not None:
                _push_mode(mode)
            for watcher in watchers:
                watcher.watch()
            if exit_call is None:
                self._unguarded.append(block)
            else:
                exit_call.args[1].append(block)
                if mode is not None:
                    block.mode_guard = _ModeGuard(exit_call, _TAKE_OFF)
                for unwatch in unwatches:
                    guard = _WatcherGuard(exit_call, _TAKE_OFF)
                    guard.pop = unwatch
                    block.watcher_guards = (*block.watcher_guards, guard)
                block.guard = _Guard(exit_call, _TAKE_OFF)
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

    def exit(self, blocks: list[_Block], kind: type[BaseException] | None) -> None:
        """End the innermost block: pop its hooks, and call `end`, or `abandon` after an exception.

        Raises:
            UsageError: this thread is in no such block. Its hooks are unchanged.
        """
        entered = blocks or self._unguarded
        if not entered:
            raise UsageError(
                "an offload block was left that this thread is not in; leave it once, in the "
                "thread that entered it: PyTorch's hooks are a thread's own"
            )
        block = entered[-1]
        if block.mode is not None and not _is_on(block.mode):
            _remove_mode(block.mode)
            block.pops = tuple(pop for pop in block.pops if pop is not _pop_mode)
        pops = map(call, block.pops)
        # Python checks for no signal from here to the end of the deque call: it calls no Python.
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


def _remove_mode(mode: TorchFunctionMode) -> None:
    """Remove a mode from the stack, also if it is not on top.

    PyTorch takes a mode off the stack while the mode runs. An interrupt may come before PyTorch is
    sure to push the mode again, or leave another's mode on top of this one.
    """
    modes = function_modes()
    if any(one is mode for one in modes):
        set_modes([one for one in modes if one is not mode])


_TAKE_OFF = methodcaller("pop")


class BlockExit:
    """The `__exit__` of an Offload: each look-up returns a new object."""

    def __get__(self, manager: Manager | None, owner: type[Manager]) -> Callable[..., None]:
        """Return the function that ends the next block."""
        if manager is None:
            return _exit_unguarded
        exit_call = partial(_exit, manager, [])
        manager.blocks.note_exit(exit_call)
        return exit_call


@untraced
def _exit(
    manager: Manager, blocks: list[_Block], kind: type[BaseException] | None, *_: object
) -> None:
    manager.blocks.exit(blocks, kind)


@untraced
def _exit_unguarded(manager: Manager, kind: type[BaseException] | None = None, *_: object) -> None:
    manager.blocks.exit([], kind)
