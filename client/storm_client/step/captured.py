"""A capture of a step: its recording, the settings that runs look up, and its results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn
from torch.optim.optimizer import Optimizer

from storm_client.step.called import Called
from storm_client.step.loops import Loop
from storm_client.step.recording import Recording

__all__ = ["VARYING_SETTINGS", "Captured", "Result", "Setting", "is_varying"]

VARYING_SETTINGS = ("lr", "momentum", "betas")
"""Settings of optimizer groups that may change at each step, as schedulers change them."""


@dataclass(frozen=True, slots=True)
class Result:
    """One result or side effect of a step: the value of a node, or a constant."""

    node: fx.Node | None
    value: Any = None
    path: tuple[Any, ...] = ()
    """Where a run puts it: ("grad", leaf), ("state", optimizer, parameter, key), ("buffer",
    module, name), ("attribute", module, name), ("mode", module, "training"); empty for a
    returned result."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A number in an optimizer's group, which a run looks up."""

    node: fx.Node
    optimizer: Optimizer
    group: int
    """The index of the group: loading a state replaces the groups."""
    key: str
    place: int | None

    def value(self) -> float:
        """Return the present value."""
        found = self.optimizer.param_groups[self.group][self.key]
        return float(found if self.place is None else found[self.place])


@dataclass
class Captured:
    """A step as it was captured."""

    recording: Recording
    loop: Loop
    modules: list[nn.Module] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    settings: list[Setting] = field(default_factory=list)
    called: Called = field(default_factory=Called)
    returned: list[Result] = field(default_factory=list)
    spec: Any = None
    """The tree of the returned value."""
    side_effects: list[Result] = field(default_factory=list)
    """The side effects that a run applies at its end, in this order."""

    @property
    def makes_state(self) -> bool:
        """Whether the step creates optimizer state or changes a module's attribute.

        Such a step comes only once: the next step has another capture.
        """
        return any(result.path[:1] in (("state",), ("attribute",)) for result in self.side_effects)

    @property
    def changed(self) -> dict[str, Any]:
        """The attributes of modules that the step changes, by name, with their new values."""
        return {
            f"{type(result.path[1]).__name__}.{result.path[2]}": result.value
            for result in self.side_effects
            if result.path[:1] == ("attribute",)
        }


def is_varying(value: object) -> bool:
    """Return whether each run looks up such a setting; non-float values are constant."""
    if isinstance(value, tuple):
        return all(type(one) is float for one in value)
    return type(value) is float
