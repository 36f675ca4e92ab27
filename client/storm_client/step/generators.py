"""Detects a step that seeds a generator, or sets its state, and draws from there.

A captured step draws from its generators' present positions, and nothing is drawn while it is
captured. So the capture counts how far each generator would advance. If a generator is at another
position at the next draw or at the end, the step has set it. Resetting a state to what it was is no
change; checkpointing does so around code that draws nothing.

A step that reads the seed of PyTorch's generator is captured for that seed. It may get the state,
but not compute with it. `draws.py` refuses other reads.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from storm_client.step.refusals import reads_a_generator, sets_a_generator

__all__ = ["Generators", "is_same"]

_FUNCTIONS: Any = torch.random
"""The module whose functions seed PyTorch's generator and set its state."""


def is_same(one: Any, other: Any) -> bool:
    """Return whether two objects are one generator: PyTorch makes a new object for each call."""
    return bool(one._cdata == other._cdata)


class Generators:
    """The generators that a step may draw from, while this thread captures it."""

    def __init__(self) -> None:
        """Watch PyTorch's own."""
        self._default = _Default()
        self._others: list[_Other] = []

    def __enter__(self) -> Generators:
        """Make PyTorch's functions find a stand-in for its generator."""
        _FUNCTIONS.default_generator = self._default
        return self

    def __exit__(self, *_: object) -> None:
        """Reset all generators to their state before the capture."""
        _FUNCTIONS.default_generator = torch.default_generator
        for other in self._others:
            other.restore()

    def watch(self, generator: torch.Generator) -> None:
        """Watch one of the step's own generators, too."""
        is_default = is_same(generator, torch.default_generator)
        if not is_default and self._other(generator) is None:
            self._others.append(_Other(generator))

    def check_read(self, tensor: torch.Tensor) -> None:
        """Raise UsageError if a tensor that the step uses is a state which it has got."""
        if any(state is tensor for state, _ in self._default.states):
            raise reads_a_generator()

    def seed_read(self) -> int | None:
        """Return the present seed of PyTorch's generator if the step has read it."""
        return torch.default_generator.initial_seed() if self._default.is_read else None

    def draw(self, generator: torch.Generator | None) -> None:
        """Note that an operation draws from a generator, by default from PyTorch's.

        Raises:
            UsageError: the step has set the generator.
        """
        other = None if generator is None else self._other(generator)
        one: _Default | _Other = self._default if other is None else other
        if one.was_set():
            raise sets_a_generator()
        one.advance()

    def check(self) -> None:
        """Raise UsageError if a generator is not where the step's draws have moved it."""
        everyone: list[_Default | _Other] = [self._default, *self._others]
        if any(one.was_set() for one in everyone):
            raise sets_a_generator()

    def _other(self, generator: torch.Generator) -> _Other | None:
        return next((one for one in self._others if is_same(one.generator, generator)), None)


class _Default:
    """Stands in for PyTorch's generator on the host, from which other threads may draw meanwhile.

    For them it is that generator; for the thread that captures, it only counts.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._drawn = self._place = 0
        self.is_read = False
        """Whether the thread has read the seed."""
        self.states: list[tuple[torch.Tensor, int]] = []
        """The states that were requested, with the generator's position at that time."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.default_generator, name)

    def was_set(self) -> bool:
        return self._place != self._drawn

    def advance(self) -> None:
        self._drawn += 1
        self._place = self._drawn

    def initial_seed(self) -> int:
        self.is_read = self.is_read or threading.get_ident() == self._thread
        return torch.default_generator.initial_seed()

    def get_state(self) -> torch.Tensor:
        state = torch.default_generator.get_state()
        if threading.get_ident() == self._thread:
            self.states.append((state, self._place))
        return state

    def set_state(self, state: torch.Tensor) -> Any:
        if threading.get_ident() != self._thread:
            return torch.default_generator.set_state(state)
        places = [place for known, place in self.states if known is state]
        self._place = places[0] if places else -1
        return self

    def manual_seed(self, seed: int) -> Any:
        if threading.get_ident() != self._thread:
            return torch.default_generator.manual_seed(seed)
        self._place = -1
        return self

    def seed(self) -> int:
        if threading.get_ident() != self._thread:
            return torch.default_generator.seed()
        self._place = -1
        return torch.default_generator.initial_seed()


class _Other:
    """A generator of the step's own, whose state says how often the step has drawn from it."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self._before = generator.get_state()
        self._drawn = 0
        self.advance()

    def advance(self) -> None:
        self._drawn += 1
        self.generator.manual_seed(_SEED + self._drawn)
        self._expected = self.generator.get_state()

    def was_set(self) -> bool:
        with torch.utils._python_dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
            return not torch.equal(self.generator.get_state(), self._expected)

    def restore(self) -> None:
        self.generator.set_state(self._before)


_SEED = 0x5708_D000
"""The start of a range of seeds that no user would choose."""
