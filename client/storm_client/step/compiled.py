"""What `compile_step` returns: captures the step when needed, and runs the captured graphs.

A run has two halves. The first half computes everything and changes only generators. The second
half changes the state in place, and cannot be interrupted. A failure in the first half leaves the
state as it was.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import torch
from torch import fx
from torch.utils import _pytree as pytree

from storm_client.arguments import check_choice, plan_options, size_of
from storm_client.client import Client
from storm_client.compile.backend import supply_of
from storm_client.compile.target import Target
from storm_client.errors import UsageError
from storm_client.monitoring.stats import OffloadStats
from storm_client.planner.plan import Plan
from storm_client.step.capture import capture
from storm_client.step.captured import Captured, Result
from storm_client.step.casts import CastProbe
from storm_client.step.explain import Explanation, explained
from storm_client.step.interrupts import uninterrupted
from storm_client.step.loops import CAPTURING
from storm_client.step.nodes import writes
from storm_client.step.program import GENERATORS, Program, program_of
from storm_client.step.same import Record
from storm_client.step.side_effects import Objects
from storm_client.step.state import State, described
from storm_client.step.temporaries import most_at_once
from storm_client.step.turns import holding
from stormd.protocol import CODECS

__all__ = ["CompiledStep"]

log = logging.getLogger(__name__)

_MANY: Final = 4
"""Captures for like arguments, after which a user is told why there is another one."""

_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks


@dataclass(eq=False)
class _Prepared:
    """One capture, ready to run."""

    key: Any
    """What describes the arguments that it is for."""
    program: Program
    state: State
    record: Record
    is_second: bool
    """Whether it was to confirm an earlier capture, and has recorded something else."""
    is_confirmed: bool = False
    """Whether a later capture has recorded the same."""


class CompiledStep:
    """A training step that runs as captured graphs under one plan.

    Call it like the function that was passed to `storm_client.compile_step`.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        *,
        budget: str | float | None,
        client: Client | None,
        codec: str,
        min_bytes: int | str,
        codegen: str,
        captures: int,
    ) -> None:
        """Prepare to capture `step` when called; options and errors are those of `compile_step`."""
        if not callable(step):
            raise UsageError(f"step is of type {type(step).__name__}; pass a function")
        if type(captures) is not int or captures < 1:
            raise UsageError(f"captures is {captures!r}; it must be a number of at least 1")
        check_choice("codegen", codegen, GENERATORS)
        check_choice("codec", codec, CODECS)
        asked = plan_options(budget, "learn", replay=False).budget
        least = size_of(min_bytes, "min_bytes")
        self._step = step
        self._target = Target(supply_of(client), asked, codec, least)
        self._codegen = codegen
        self._captures = captures
        self._casts = CastProbe()
        self._has_warned = False
        self._lock = threading.RLock()  # protects the list below; a run holds it
        self._known: list[_Prepared] = []
        """The captures that are kept, the one used last at the end."""
        self.__wrapped__ = step

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Run one step, and return the function's results, without gradients.

        Raises:
            UsageError: the function cannot be captured, the budget is below the least possible in
                the first call, or the step is called within saved-tensor hooks or again within one
                autocast block. Nothing has changed.
            StormError: stored values cannot be restored. Nothing has changed but that generators
                have advanced.
        """
        if CAPTURING.loop is not None:
            return self._step(*arguments, **options)  # as a part of the step being captured
        if _top_hooks(True) is not None:
            raise UsageError(
                "the step is called where saved tensors are handed to hooks, as in a `with "
                "offload:`, but a run saves none; call it outside: its own plan decides what to "
                "offload"
            )
        with holding(self._lock):
            leaves, spec = pytree.tree_flatten((arguments, options))
            key = (spec, tuple(map(described, leaves)))
            self._casts.look()
            prepared, values = self._prepared(key, leaves, arguments, options)
            others = [one for one in self._known if one is not prepared]
            self._known = [*others, prepared][-self._captures :]
            self._target.graphs = [graph for one in self._known for graph in one.program.graphs]
            if any(map(writes, prepared.program.ordered.late)):
                self._casts.check()
            return self._run(prepared, values)

    # --- choosing a capture -----------------------------------------------------------------

    def _prepared(
        self, key: Any, leaves: list[object], arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[_Prepared, dict[fx.Node, Any]]:
        alike = [one for one in self._known if one.key == key]
        known = [one.program.captured for one in alike]
        captured = None
        for prepared in reversed(alike):
            values = prepared.state.values(leaves)
            if values is not None:
                if prepared.is_confirmed:
                    return prepared, values
                captured = self._capture(arguments, options, leaves, known)
                if _does_the_same(prepared, prepared.record.difference(values, Record(captured))):
                    self._confirm(prepared, captured)
                    return prepared, values
                break
        differs = (
            alike[-1].state.different(leaves) if len(alike) >= min(_MANY, self._captures) else []
        )
        is_second = captured is not None
        captured = captured or self._capture(arguments, options, leaves, known)
        prepared = self._prepare(key, captured, leaves, is_second=is_second)
        if differs:
            self._warn(
                f"and again: {differs[0]} differs between calls. Pass it as a tensor, or read it "
                "outside of the step."
            )
        values = prepared.state.values(leaves)
        if values is None:
            raise UsageError(
                "the step changes what it decides by while it runs, so that no capture of it can "
                "be used; leave counters and switches to what calls it"
            )
        return prepared, values

    def _confirm(self, prepared: _Prepared, later: Captured) -> None:
        """Let a capture run again, unless it asks what only each call of the step could tell."""
        asked = prepared.program.captured.called.asked or later.called.asked
        prepared.is_confirmed = asked is None
        if asked is not None:
            self._warn(
                f"at each call, because it asks {asked}, whose answer stormd cannot compare. Ask "
                "outside of the step, and pass the answer as an argument."
            )

    def _warn(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            name = getattr(self._step, "__qualname__", "the step")
            log.warning(
                "stormd: %s is captured again %s A capture takes as long as the first call.",
                name,
                why,
            )

    def _capture(
        self,
        arguments: tuple[Any, ...],
        options: dict[str, Any],
        leaves: list[object],
        known: list[Captured],
    ) -> Captured:
        """Capture the step, and check that the capture left nothing in Python objects.

        `known` are the captures for like arguments.
        """
        objects = Objects(self._step, leaves)
        try:
            captured = capture(self._step, arguments, options)
            objects.check()
            captured.called.conclude()
            objects.check_left(captured.recording)
        except BaseException:
            objects.put_back()
            raise
        _check_changed(captured, known)
        return captured

    def _prepare(
        self, key: Any, captured: Captured, leaves: list[object], *, is_second: bool
    ) -> _Prepared:
        record = Record(captured)
        codegen = "eager" if captured.makes_state else self._codegen
        program = program_of(captured, codegen, self._target)
        if all(one.tensor.is_cpu for one in captured.recording.outside.values()):
            _keep_freed(most_at_once(program.temporaries()))
        return _Prepared(key, program, State(captured, self._step, leaves), record, is_second)

    # --- a run ------------------------------------------------------------------------------

    def _run(self, prepared: _Prepared, values: dict[fx.Node, Any]) -> Any:
        program = prepared.program
        values.update(program.ordered.constants)
        with torch.no_grad(), torch._C._DisableAutocast(), torch._C.DisableTorchFunction():
            program.work(values, self._target)
            with uninterrupted():
                _finish(program, values)
        captured = program.captured
        leaves = [
            _value(program, place, result, values) for place, result in enumerate(captured.returned)
        ]
        return pytree.tree_unflatten(leaves, captured.spec)

    # --- reports ----------------------------------------------------------------------------

    def captures(self) -> list[Program]:
        """Return the programs of the captures that are kept, in the order of use."""
        return [one.program for one in self._known]

    def explain(self) -> Explanation:
        """Describe the capture of the latest call: graph, plan, and memory.

        Raises:
            UsageError: the step was not called yet.
        """
        if not self._known:
            raise UsageError("there is nothing to explain before the first call: make a step")
        return explained(self._known[-1].program)

    def plans(self) -> list[Plan]:
        """Return the plans of the captures that are kept, in the order of use."""
        return [graph.plan for graph in self._target.graphs]

    def stats(self) -> OffloadStats:
        """Return statistics of the offloads so far, waiting up to a second for stores in flight."""
        return self._target.stats()

    def __reduce__(self) -> NoReturn:
        """Raise UsageError: it cannot be copied or pickled."""
        raise UsageError(
            "a compiled step belongs to the model and optimizer that its function uses; copy or "
            "pickle those, and call storm_client.compile_step where they are"
        )


def _does_the_same(prepared: _Prepared, differs: str | None) -> bool:
    """Return whether a second capture has recorded the same as the one that may run again.

    What only a first call does, such as filling a table, makes one difference. The second capture
    runs then.
    """
    if differs is not None and prepared.is_second:
        raise UsageError(
            f"the step does not do the same in each call ({differs}), though nothing that "
            "stormd compares has changed: it reads a clock, a file, an iterator or something "
            "else that only its capture would read; pass that as an argument"
        )
    return differs is None


def _check_changed(captured: Captured, known: list[Captured]) -> None:
    """Refuse a step that changes again what an earlier capture of `known` has changed.

    What it sets for the first time may be set once for all, or be reset by each step.
    """
    earlier = {name: value for one in known for name, value in one.called.changed.items()}
    again = {name for one in known for name in one.changed} & captured.changed.keys()
    now = captured.called.changed
    again |= {name for name in now.keys() & earlier.keys() if now[name] != earlier[name]}
    if again:
        name = min(again)
        value = f", now to {captured.changed[name]!r}" if name in captured.changed else ""
        raise UsageError(
            f"the step changes {name} again and again{value}, but its Python code runs only when "
            "it is captured; leave counting to what calls the step, or make it a buffer"
        )


MAX_KEPT = (32 << 20) - (1 << 16)
"""Bytes of the largest block that can raise glibc's limit, less its header and rounding."""


def _keep_freed(nbytes: int) -> None:
    """Make the C library keep `nbytes` bytes of freed memory between steps, up to 32 MiB.

    glibc returns free memory at the end of its heap to the system beyond a limit. The limit is
    twice the largest block that it has seen freed. Without this, each step would have its memory
    mapped and zeroed again. Where the environment sets the limit, it stays as set.
    """
    torch.empty(min(nbytes, MAX_KEPT), dtype=torch.uint8, device="cpu")


def _finish(program: Program, values: dict[fx.Node, Any]) -> None:
    """Change the state: run the late graph, then apply the side effects."""
    late = program.late
    given = [values[node] for node in late.inputs]
    for node in late.drops:
        del values[node]
    values.update(zip(late.results, late.run(given), strict=True))
    captured = program.captured
    for place, result in enumerate(captured.side_effects, len(captured.returned)):
        _put(result, _value(program, place, result, values), captured, values)


def _value(program: Program, place: int, result: Result, values: dict[fx.Node, Any]) -> Any:
    node = program.ordered.results[place]
    if node is None:
        return result.value
    return values[node].detach() if place in program.ordered.detached else values[node]


def _put(result: Result, value: Any, captured: Captured, values: dict[fx.Node, Any]) -> None:
    kind, *path = result.path
    if kind == "grad":
        known = captured.recording.outside.get(id(path[0]))
        tensor = path[0] if known is None else values[known.node]  # this run's, not the capture's
        tensor.grad = value
    elif kind == "state":
        optimizer, parameter, key = path
        optimizer.state[parameter][key] = value
    elif kind == "buffer":
        module, name = path
        module._buffers[name] = value
    else:
        module, name = path
        module.__dict__[name] = value
