"""Offloads the activations of Lightning's `fit`; validation, testing and prediction are left alone.

    from storm_client.integrations.lightning import OffloadCallback

    trainer = Trainer(callbacks=[OffloadCallback()])

An Offload's block lies around each `training_step`, which is the forward pass, and with manual
optimization the backward pass too. The pairs of callback events around it do not do: one that
follows is not called where a step raises or is skipped, and hooks would stay on. So the strategy's
`training_step` is replaced from the start of training to its end, and put back.

OffloadCallback is made when it is first asked for, because it derives from Lightning's Callback:
that of `lightning`, or of `pytorch_lightning` where the script has loaded that one alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from storm_client.errors import UsageError
from storm_client.integrations.figures import StepFigures
from storm_client.integrations.offloads import make_offload

if TYPE_CHECKING:
    from lightning.pytorch import Callback

    from storm_client.client import Client
    from storm_client.offloading import Offload

__all__ = ["OffloadCallback"]


class FitHooks:
    """What OffloadCallback does at the events of a fit."""

    def __init__(self, *, client: Client | None = None, **options: Any) -> None:
        """Take the options of `Client.offload`, and optionally another client than the shared one.

        The options are checked when training starts. The Offload is made then, too, since the model
        is on its device by then.
        """
        self._client = client
        self._options = options
        self._offload: Offload | None = None
        self._figures: StepFigures | None = None
        self._replaced: tuple[Any, Any] | None = None
        """The strategy whose `training_step` was replaced, and the attribute's value before."""

    @property
    def offload(self) -> Offload:
        """The Offload of the last fit.

        Raises:
            UsageError: no training has started.
        """
        if self._offload is None:
            raise UsageError(
                "OffloadCallback has no Offload yet: it is made where trainer.fit(model) starts"
            )
        return self._offload

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Make the Offload and run each training step inside its block.

        Raises:
            UsageError: as `Client.offload`.
            DaemonUnavailable, ProtocolMismatch: as `storm_client.connect`.
        """
        self._restore()
        offload = self._offload = make_offload(self._client, pl_module, self._options)
        self._figures = StepFigures(offload.stats(), trainer.global_step)
        strategy = trainer.strategy
        self._replaced = strategy, vars(strategy).get("training_step")
        strategy.training_step = partial(_inside, offload, strategy.training_step)

    def on_train_batch_end(self, trainer: Any, *_: object, **__: object) -> None:
        """Log the figures of `storm_client.integrations.figures`, as often as Lightning logs."""
        step, every = trainer.global_step, trainer.log_every_n_steps
        if self._figures is None or not trainer.loggers or not every or step % every:
            return
        figures = self._figures.since_last(self.offload.stats(), step)
        if figures:
            for logger in trainer.loggers:
                logger.log_metrics(figures, step=step)

    def _restore(self, *_: object, **__: object) -> None:
        """Restore the strategy's method."""
        if self._replaced is None:
            return
        strategy, before = self._replaced
        self._replaced = None
        if before is None:
            del strategy.training_step
        else:
            strategy.training_step = before

    on_train_end = on_exception = teardown = _restore

    def __getstate__(self) -> dict[str, Any]:
        """Return the options only: a spawned process begins anew."""
        return {"_options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin anew, with the process's shared client."""
        FitHooks.__init__(self, **state["_options"])


if TYPE_CHECKING:

    class OffloadCallback(FitHooks, Callback):  # type: ignore[misc]  # its types are not read
        """Offloads what autograd saves in training steps: FitHooks as a Lightning Callback."""


def _inside(offload: Offload, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with offload:
        return step(*args, **kwargs)


def __getattr__(name: str) -> Any:
    if name != "OffloadCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = type(
        name, (FitHooks, _callback()), {"__module__": __name__, "__doc__": FitHooks.__doc__}
    )
    globals()[name] = made  # later look-ups find the class directly, also pickle's
    return made


def _callback() -> type:
    """Return the Callback of the package that the script has loaded, by default of `lightning`."""
    ours, other = "lightning.pytorch", "pytorch_lightning"
    name = other if other in sys.modules and ours not in sys.modules else ours
    found: type = import_module(name).Callback
    return found
