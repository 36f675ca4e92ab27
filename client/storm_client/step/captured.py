"""What a capture of a step is: its recording, the settings that runs look up, and its results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn
from torch.optim.optimizer import Optimizer

from storm_client.step.loops import Loop
from storm_client.step.recording import Recording

__all__ = ["LIFTED", "Captured", "Result", "Setting", "is_lifted"]

LIFTED = ("lr", "momentum", "betas")
"""Settings of optimizers' groups that may change at each step, as schedulers change them."""


@dataclass(frozen=True, slots=True)
class Result:
    """One thing that a step leaves behind: a node's value, or what it is itself."""

    node: fx.Node | None
    value: Any = None
    path: tuple[Any, ...] = ()
    """Where it is put: ("grad", leaf), ("state", optimizer, parameter, key),
    ("buffer", module, name), ("attribute", module, name), ("mode", module, "training"); empty for
    what the step returns."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A number in an optimizer's group, which a run looks up."""

    node: fx.Node
    optimizer: Optimizer
    group: int
    """Which of its groups: the group is another when a state was loaded."""
    key: str
    place: int | None

    def value(self) -> float:
        """Return what it is now."""
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
    returned: list[Result] = field(default_factory=list)
    spec: Any = None
    """The tree of what is returned."""
    left: list[Result] = field(default_factory=list)
    """What is put somewhere when a run ends, in this order."""

    @property
    def makes_state(self) -> bool:
        """Whether this is the step that makes the state of optimizers, which comes but once.

        So does one that changes an attribute of a module: the next is another capture.
        """
        return any(result.path[:1] in (("state",), ("attribute",)) for result in self.left)

    @property
    def changed(self) -> dict[str, Any]:
        """The attributes of modules that the step changes, by name, with what they become."""
        return {
            f"{type(result.path[1]).__name__}.{result.path[2]}": result.value
            for result in self.left
            if result.path[:1] == ("attribute",)
        }


def is_lifted(value: object) -> bool:
    """Tell whether a setting of `LIFTED` is looked up by each run; what is no float is constant."""
    if isinstance(value, tuple):
        return all(type(one) is float for one in value)
    return type(value) is float
