"""Offloads the activations of a transformers `Trainer`, and of classes that derive from it.

    from storm_client.integrations.transformers import offload_trainer

    trainer = offload_trainer(Trainer(model=model, args=args, train_dataset=data))
    trainer.train()

The Trainer has no callback event between the forward and the backward pass of a micro-batch, so its
class is extended. Each loss of a micro-batch is computed inside an Offload's block, which ends
before the backward pass begins. Evaluation and prediction, which keep nothing for a backward pass,
are not changed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from storm_client.errors import UsageError
from storm_client.integrations.figures import StepFigures
from storm_client.integrations.offloads import make_offload

if TYPE_CHECKING:
    from storm_client.client import Client
    from storm_client.offloading import Offload

__all__ = ["OffloadMixin", "offload_trainer"]

SomeTrainer = TypeVar("SomeTrainer")


def offload_trainer(
    trainer: SomeTrainer, *, client: Client | None = None, **options: Any
) -> SomeTrainer:
    """Make an existing Trainer offload its activations; return the same object.

    `options` are those of `Client.offload`. Without `client`, the process's shared client is used.
    A second call replaces the options of the first. The trainer's class becomes one that derives
    from its own and from OffloadMixin, under the same name. If a TRL trainer's configuration sets
    `activation_offloading`, this offloading replaces TRL's.

    Raises:
        UsageError: `trainer` is no Trainer, spreads one process over several GPUs, or an option
            is wrong; the trainer is unchanged.
        DaemonUnavailable, ProtocolMismatch: as `storm_client.connect`.
    """
    _check(trainer)
    steps = _TrainerSteps(trainer, client, options)
    kind: Any = type(trainer)
    if not issubclass(kind, OffloadMixin):
        own = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        extended: Any = type(kind.__name__, (OffloadMixin, kind), own)
        trainer.__class__ = extended
    _begin(trainer, steps)
    return trainer


class OffloadMixin:
    """A base class to put before a Trainer class, so that its activations are offloaded.

        class MyTrainer(OffloadMixin, Trainer): ...

    The Trainer then takes two more arguments: `offload_options`, a dict of the options of
    `Client.offload`, and `offload_client`. Its logs contain the figures of
    `storm_client.integrations.figures`, each a mean per optimizer step since the last log. At the
    end of training they contain those of the whole run, under names that begin with `train_`.
    """

    _storm_steps: _TrainerSteps

    def __init__(
        self,
        *args: Any,
        offload_options: Mapping[str, Any] | None = None,
        offload_client: Client | None = None,
        **kwargs: Any,
    ) -> None:
        """Make the Trainer, then its Offload.

        Raises:
            UsageError: no Trainer class follows the mixin, or as `offload_trainer`.
            DaemonUnavailable, ProtocolMismatch: as `storm_client.connect`.
        """
        super().__init__(*args, **kwargs)
        _check(self)
        _begin(self, _TrainerSteps(self, offload_client, offload_options or {}))

    @property
    def storm_offload(self) -> Offload:
        """The Offload of the model in training; its `stats()` cover all its steps."""
        return self._storm_steps.offload

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a micro-batch as the Trainer does, with its activations offloaded."""
        with self._storm_steps.micro_batch():
            return super().training_step(*args, **kwargs)  # type: ignore[misc]

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Compute a loss as the Trainer does, in an Offload's block if a backward pass follows."""
        with self._storm_steps.loss():
            return super().compute_loss(*args, **kwargs)  # type: ignore[misc]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log what the Trainer logs, and the offload figures."""
        self._storm_steps.add_figures(logs)
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


class _TrainerSteps:
    """Decides where a Trainer's blocks begin and end, and adds their figures to its logs."""

    def __init__(self, trainer: Any, client: Client | None, options: Mapping[str, Any]) -> None:
        self._trainer = trainer
        self._client = client
        self._options = dict(options)
        self._computes_losses = True
        """Whether `training_step` calls `compute_loss`; else the whole step is one block."""
        self._saw_loss = False
        self._figures: StepFigures | None = None
        self._begin()

    def micro_batch(self) -> AbstractContextManager[object]:
        """Return the context for a micro-batch, forward and backward."""
        if self._trainer.model is not self._model:
            self._begin()  # a search for hyperparameters makes a model per trial
        step = self._trainer.state.global_step
        if self._figures is None or step < self._figures.last_step:  # or training was restarted
            self._figures = StepFigures(self.offload.stats(), step)
        elif not self._saw_loss:
            self._computes_losses = False
        return nullcontext() if self._computes_losses else self.offload

    def loss(self) -> AbstractContextManager[object]:
        """Return the context in which to compute a loss."""
        self._saw_loss = True
        is_trained = torch.is_grad_enabled() and self._computes_losses
        return self.offload if is_trained else nullcontext()

    def add_figures(self, logs: dict[str, float]) -> None:
        """Add figures to the logs of training, in place: the Trainer uses the same dict later."""
        if self._figures is None:
            return
        step = self._trainer.state.global_step
        if "loss" in logs:
            logs.update(self._figures.since_last(self.offload.stats(), step))
        elif "train_runtime" in logs:
            found = self._figures.of_all(self.offload.stats(), step)
            logs.update({f"train_{name}": value for name, value in found.items()})

    def _begin(self) -> None:
        """Make the Offload for the trainer's current model."""
        self._model = self._trainer.model
        self.offload = make_offload(self._client, self._model, self._options)
        self._figures = None


def _begin(trainer: Any, steps: _TrainerSteps) -> None:
    trainer._storm_steps = steps
    if hasattr(trainer, "maybe_activation_offload_context"):
        trainer.maybe_activation_offload_context = nullcontext()  # TRL's, around forward and back


def _check(trainer: object) -> None:
    """Raise an error unless it is a Trainer whose forward pass runs in the calling thread."""
    module = sys.modules.get("transformers.trainer")
    if module is None or not isinstance(trainer, module.Trainer):
        raise UsageError(
            f"offload_trainer got an object of type {type(trainer).__name__}; pass a "
            "transformers.Trainer, or one that derives from it, and elsewhere write "
            "`with storm_client.offload(model):` around the forward pass"
        )
    count = trainer.args.n_gpu
    if count > 1:
        raise UsageError(
            f"this process trains on {count} GPUs by torch.nn.DataParallel, whose threads no "
            f"offload sees: start one process a GPU with `torchrun --nproc-per-node {count}`, or "
            "show it one GPU with CUDA_VISIBLE_DEVICES=0"
        )
