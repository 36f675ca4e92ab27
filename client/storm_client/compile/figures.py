"""The figures by which graphs are planned: of the daemon's transfers and of the device.

Graphs are planned before the first step, and not again. The ranks of a job plan by the figures of
the rank that asks first: in each layer all would wait for one that has planned otherwise.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch
from torch.utils._python_dispatch import _disable_current_modes

from storm_client.compile.device_rates import rates_of
from storm_client.errors import StormError
from storm_client.job_store import STORE_SECONDS, are_several, own_connection, within
from storm_client.planner.machine import Machine

if TYPE_CHECKING:
    from storm_client.transport.daemon_loss import Supply

__all__ = ["measured"]

log = logging.getLogger(__name__)

_agreed: dict[str, Machine] = {}
"""The figures of a job's ranks, by type of device."""


def measured(machine: Machine, device: torch.device, supply: Callable[[], Supply]) -> Machine:
    """Return default figures with those that are measured: by the daemon, here, or by another rank.

    The daemon's session for the device is opened. Without a daemon its figures are the defaults;
    who then offloads something gets the error.
    """
    if not are_several():
        return _measured_here(machine, device, supply)
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    if kind not in _agreed:
        _agreed[kind] = _first_of_ranks(kind, _measured_here(machine, device, supply))
    return _agreed[kind]


def _measured_here(machine: Machine, device: torch.device, supply: Callable[[], Supply]) -> Machine:
    with _disable_current_modes():  # PyTorch is compiling: tensors made here would be fake
        with suppress(StormError):
            sessions = supply()
            sessions.current().of(device)
            machine = machine.with_transfers(sessions.figures(device))
        rates = rates_of(device)
    return machine if rates is None else machine.with_rates(rates)


def _first_of_ranks(kind: str, machine: Machine) -> Machine:
    """Return the figures that a rank has written first, or these if the store has failed."""
    key, text = f"stormd/figures/{kind}", json.dumps(asdict(machine), default=sorted)
    try:
        first = within(STORE_SECONDS, lambda: own_connection().compare_set(key, "", text))
        return Machine.of(json.loads(first))
    except Exception as error:  # noqa: BLE001 - no compilation may fail of it
        log.warning("the job's store has failed (%r): ranks may plan their graphs apart", error)
        return machine
