"""The Offload object of a script; each of its `with` blocks is a step.

Several threads may enter an Offload at once, and blocks may be nested. Every block is its own step
with its own pair of hooks (`hooks.py`); PyTorch applies the thread's innermost hooks.
"""

from __future__ import annotations

import warnings
from copy import deepcopy
from itertools import chain
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from storm_client.checkpointing import CheckpointedLayers
from storm_client.connecting import shared_supply
from storm_client.eager.controller import Planning
from storm_client.eager.plan_maker import PlanOptions
from storm_client.errors import UsageError
from storm_client.hook_stack import BlockExit, Blocks, untraced
from storm_client.hooks import StepHooks
from storm_client.losses import in_blocks
from storm_client.monitoring.advice import FirstSteps, advice
from storm_client.monitoring.budget_reports import Advising
from storm_client.monitoring.compiled_models import CompiledModels
from storm_client.monitoring.layers import Layers, modules_inside
from storm_client.monitoring.report import Report
from storm_client.monitoring.stats import OffloadStats, StatsRecorder
from storm_client.monitoring.summary import Summary, log_line
from storm_client.monitoring.trace import Traces
from storm_client.planner import OrderHistory
from storm_client.planner.decisions import NO_ACTIVATIONS
from storm_client.planner.machine import TransferFigures
from storm_client.policy import Policy

if TYPE_CHECKING:
    from storm_client.planner.plan import Plan
    from storm_client.transport.daemon_loss import Supply

__all__ = ["Offload", "OffloadOptions"]

SETTLE_SECONDS = 1.0
"""Seconds that stats() waits until the daemon has encoded the latest stores."""


class OffloadOptions(NamedTuple):
    """The options of an Offload, checked."""

    modules: tuple[torch.nn.Module, ...]
    min_bytes: int
    codec: str
    options: PlanOptions
    layers: tuple[torch.nn.Module, ...]
    """Those whose calls in a block are checkpointed."""
    loss: str
    """How losses are computed: "tiled" or "plain"."""


class Offload:
    """Offloads tensors that autograd saves inside its `with` blocks; Client.offload makes it."""

    def __init__(self, *_: object, **__: object) -> None:
        """Refuse: use `storm_client.offload` or Client.offload to make an Offload.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "an Offload is made by storm_client.offload(model), or by connect() and "
            "client.offload(model), which take a module or a list of modules, min_bytes and codec"
        )

    @classmethod
    def of(cls, supply: Supply, options: OffloadOptions) -> Offload:
        """Return an Offload that uses the sessions of a client; the client ends them."""
        offload = cls.__new__(cls)
        offload._begin(_Daemon(supply), options)
        return offload

    def _begin(self, daemon: _Daemon, options: OffloadOptions) -> None:
        self._daemon = daemon
        self._options = options
        self._policy = Policy(options.modules, options.min_bytes)
        self._recorder = StatsRecorder()
        self._history = OrderHistory()
        self._first_steps = FirstSteps()
        self._summary = Summary()
        self._advising = Advising.from_environment()
        self._traces = Traces()
        self._compiled = CompiledModels()
        self._planning = Planning(
            options.options,
            self._recorder.ratio,
            Layers(options.modules),
            daemon.figures,
            daemon.latest_figures,
        )
        self._layers = CheckpointedLayers(options.layers)
        if options.loss == "tiled":
            in_blocks.substitute()
        self.blocks = Blocks()

    @untraced
    def __enter__(self) -> Offload:
        """Begin a step in this thread.

        Raises:
            UsageError: the client is closed or forked, or the budget cannot be kept.
            DaemonLost: the client has lost its daemon.
        """
        supply = self._daemon.connected()
        sessions = supply.current()
        if self._first_steps.is_due():
            self._warn_if_little_offloaded()
        line = self._summary.step_begins(
            perf_counter(),
            self._recorder,
            self._policy.small_owned_bytes,
            self._device_peak,
            self._planning.is_comparing,
        )
        if line is not None:
            log_line(line)
        if self._advising is not None:
            self._advise(self._advising)
        sessions.sweep()
        self._policy.refresh()
        self._compiled.warn_if_compiled(self._options.modules)
        step = StepHooks(
            sessions,
            self._policy,
            self._options.codec,
            self._recorder,
            self._history,
            planning=self._planning,
            keeps_without_daemon=supply.keeps_without_daemon,
            traces=self._traces,
            layers=self._layers,
            tiles_losses=self._options.loss == "tiled",
            compiled=self._compiled if self._first_steps.is_pending else None,
        )
        line = self._planning.settled_line()
        if line is not None:
            log_line(line)
        self.blocks.enter(step)
        step.begin()
        return self

    if TYPE_CHECKING:

        def __exit__(self, *_: object) -> None:
            """End the step; its saved tensors live as long as the graph that needs them."""
    else:
        __exit__ = BlockExit()

    def stats(self) -> OffloadStats:
        """Return the statistics so far; wait up to a second until stores in flight have ended."""
        if self._daemon.supply is not None:
            self._daemon.supply.sessions.settle(SETTLE_SECONDS)
        return self._recorder.snapshot()

    def report(self) -> Report:
        """Return a report by layer, with the plan and a timeline of the latest step.

        Printing the report shows a table, and in a notebook also a picture; `draw(path)` writes the
        picture. This waits as `stats` does.

        Raises:
            UsageError: the budget cannot be kept.
        """
        stats = self.stats()
        return Report(
            stats=stats,
            layers=self._recorder.layers(),
            steps=self._summary.begun,
            plan=self.plan,
            timeline=self._traces.timeline(),
        )

    def _repr_html_(self) -> str:
        """Return the report for a notebook; only the statistics if the budget cannot be kept."""
        try:
            return self.report()._repr_html_()
        except UsageError:
            return self.stats()._repr_html_()

    @property
    def address(self) -> str:
        """The daemon's address, for `stormd status --address`."""
        return self._daemon.connected().sessions.address

    @property
    def plan(self) -> Plan | None:
        """The plan of the latest step signature; None before the first step has ended.

        Raises:
            UsageError: the budget cannot be kept.
        """
        return self._planning.plan()

    def __deepcopy__(self, memo: dict[int, Any]) -> Offload:
        """Return an Offload of the same client for the copied modules, with its own statistics."""
        copied = memo[id(self)] = type(self).__new__(type(self))  # the modules may refer to it
        modules, layers = deepcopy((self._options.modules, self._options.layers), memo)
        options = self._options._replace(modules=modules, layers=layers)
        copied._begin(_Daemon(self._daemon.supply), options)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """Return the options of the Offload: all other state belongs to this process."""
        return self._options._asdict()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Start anew; the first block connects to a daemon."""
        self._begin(_Daemon(None), OffloadOptions(**state))

    def _warn_if_little_offloaded(self) -> None:
        """Warn if the first steps offloaded little of their activations; `__enter__` calls this."""
        totals, steps = self._recorder.kept_totals(), self._first_steps.begun - 1
        if not totals.stats.saved_bytes:
            self._first_steps.postpone()
            return
        # Checkpointed layers do not hand their parameters over to the saved-tensor hooks.
        named = set(map(id, modules_inside(self._layers.modules)))
        outside = (part for part in modules_inside(self._options.modules) if id(part) not in named)
        parameters = chain.from_iterable(part.parameters(recurse=False) for part in outside)
        text = advice(totals, steps, self._policy.min_bytes, parameters)
        activations = totals.stats.saved_bytes - sum(
            totals.skipped_bytes.get(reason, 0) for reason in NO_ACTIVATIONS
        )
        text = self._compiled.advice(activations // steps) or text
        if text is not None:
            warnings.warn(text, RuntimeWarning, stacklevel=3)

    def _advise(self, advising: Advising) -> None:
        """Report to `stormd advise`, which has started this script, the progress it waits for."""
        planning = self._planning
        advising.step_begins(
            perf_counter(), planning.plans_for, planning.ratio, lambda: planning.devices
        )

    def _device_peak(self) -> int | None:
        """Return the largest peak of allocated bytes among the model's GPUs; None without a GPU."""
        peaks = map(torch.cuda.max_memory_allocated, self._planning.devices)
        return max(peaks, default=None)


class _Daemon:
    """The sessions that an Offload uses."""

    def __init__(self, supply: Supply | None) -> None:
        """Use these sessions; None stands for those of the shared client, at the first block."""
        self.supply = supply

    def connected(self) -> Supply:
        """Return the sessions."""
        if self.supply is None:
            self.supply = shared_supply()
        return self.supply

    def figures(self, device: torch.device) -> TransferFigures:
        """Return the daemon's figures for a device's link; empty if it does not answer."""
        return TransferFigures() if self.supply is None else self.supply.figures(device)

    def latest_figures(self, device: torch.device) -> TransferFigures:
        """Return the link figures that the daemon reported last, without asking it."""
        return TransferFigures() if self.supply is None else self.supply.latest_figures(device)
