"""Warns of an Offload that takes little off the device, and says what to set instead.

The first steps are examined once; after that, a step costs one comparison. There is at most one
warning, and none if no setting would help or the activations are too small to matter. Everything
here is pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import torch

from storm_client.monitoring.stats import KeptTotals
from storm_client.saved.distributed import nbytes_of
from stormd.protocol.sizes import format_size

__all__ = ["FirstSteps", "advice"]

EXAMINED_STEPS = 2
"""Steps examined: the second is like later ones, since the order of the first is known."""

MIN_BYTES = 4 << 20
"""Per step: steps that save less need no advice."""

MIN_TENSOR_BYTES = 16 << 10
"""Offloading a smaller tensor takes longer than it is worth, on average."""

MANY_PARAMETERS = 8
"""A model with so many large ones has operations in sequence, most of which save a parameter."""

MAX_SEEN_SHARE = 1 / 16
"""Share of a model's parameters that are saved if only its ends run outside of a checkpoint."""


class FirstSteps:
    """Counts the steps of an Offload up to the one that examines them. Threads may share it."""

    def __init__(self) -> None:
        self.begun = 0
        self._due = EXAMINED_STEPS + 1

    @property
    def is_pending(self) -> bool:
        """Whether the first steps were not examined yet."""
        return self.begun < self._due

    def is_due(self) -> bool:
        """Note that a step begins; return whether to examine the steps before it."""
        self.begun += 1
        return self.begun == self._due

    def postpone(self) -> None:
        """Postpone the examination: nothing has been saved, as in a validation."""
        self._due = 2 * self.begun


def advice(
    totals: KeptTotals, steps: int, min_bytes: int, parameters: Iterable[torch.nn.Parameter]
) -> str | None:
    """Return the problem seen in `steps` steps, its cause, and what to set; None without a problem.

    `parameters` are those of the Offload's modules.
    """
    owned = list(parameters)
    stats, skipped = totals.stats, totals.skipped_bytes
    # Small tensors are not examined any further: parameters may be among them.
    small_owned = sum(one for one in map(nbytes_of, owned) if one < min_bytes)
    small = max(0, skipped.get("small", 0) - steps * small_owned)
    activations = stats.saved_bytes - stats.deduplicated_bytes - skipped.get("small", 0) + small
    activations -= skipped.get("parameter", 0) + skipped.get("leaf", 0)
    if activations < steps * MIN_BYTES:
        large = [one for one in owned if one.requires_grad and nbytes_of(one) >= min_bytes]
        return _without_hooks(totals, steps, activations, large)
    reasons = {"small": small, **{name: totals.kept_bytes.get(name, 0) for name in _KEPT}}
    reason = max(reasons, key=lambda name: reasons[name])
    kept = reasons[reason]
    if kept <= stats.offloaded_bytes or 4 * kept < activations:
        return None
    why = _small(totals, min_bytes) if reason == "small" else _KEPT[reason](totals, steps)
    if why is None:
        return None
    return (
        f"little memory is saved: of {format_size(activations)} of activations in {steps} steps, "
        f"{format_size(kept)} were kept on the device and "
        f"{format_size(stats.offloaded_bytes)} offloaded; " + why
    )


def _pool_full(totals: KeptTotals, steps: int) -> str:
    more = format_size(totals.kept_bytes["pool_full"] / steps / totals.stats.ratio)
    return (
        f"the daemon's pool was full: set pool_bytes larger by about {more}, in connect() for a "
        "daemon that it starts, else with `stormd serve --pool-bytes`"
        + _daemon_detail(totals, "pool_full")
    )


def _quota(totals: KeptTotals, steps: int) -> str:
    more = format_size(totals.kept_bytes["quota"] / steps)
    return (
        f"a quota of the daemon was reached: {more} more is wanted of its session_quota_bytes, "
        "uid_quota_bytes or pool_bytes" + _daemon_detail(totals, "quota")
    )


def _daemon_detail(totals: KeptTotals, reason: str) -> str:
    """Return the daemon's own message about the last range that it did not accept, if any."""
    detail = totals.details.get(reason, "")
    return f" (it said: {detail})" if detail else ""


def _daemon_slow(totals: KeptTotals, steps: int) -> str:  # noqa: ARG001 - as its neighbours
    return (
        "the daemon did not take it in time: see `stormd status` and `stormd doctor`; give it more "
        'cores with encode_threads, or set codec="raw"'
    )


def _no_staging(totals: KeptTotals, steps: int) -> str:  # noqa: ARG001 - as its neighbours
    detail = totals.details.get("no_staging", "")
    return f"the daemon cannot map its memory, and no staging area could be made ({detail})"


def _small(totals: KeptTotals, min_bytes: int) -> str | None:
    """Advise for most of the bytes: tensors below half of the mean have less than half of them."""
    count = max(1, totals.stats.skipped.get("small", 0))
    mean = totals.skipped_bytes["small"] // count
    if mean < MIN_TENSOR_BYTES:
        return None
    lower = 1 << (mean // 2).bit_length() - 1
    return (
        f"{count} tensors, of {format_size(mean)} on average, were below min_bytes, "
        f"{format_size(min_bytes)}: set min_bytes={lower}"
    )


def _without_hooks(
    totals: KeptTotals, steps: int, activations: int, trained: list[torch.nn.Parameter]
) -> str | None:
    """Return a warning if a model of some size seems to have run without the hooks."""
    seen = totals.stats.skipped.get("parameter", 0) / steps
    if len(trained) < MANY_PARAMETERS or seen > MAX_SEEN_SHARE * len(trained):
        return None
    if sum(map(nbytes_of, trained)) < MIN_BYTES:
        return None
    return (
        f"little memory is saved: in {steps} steps the hooks saw {format_size(activations)} of "
        f"activations, and {seen:.0f} of the model's {len(trained)} large parameters a step; only "
        "the innermost pair of saved-tensor hooks applies, so what runs under "
        "torch.utils.checkpoint or other hooks inside `with offload:` is not seen: checkpoint "
        "less, or nothing where offload is to save instead"
    )


_KEPT: Final[dict[str, Callable[[KeptTotals, int], str]]] = {
    "pool_full": _pool_full,
    "quota": _quota,
    "daemon_slow": _daemon_slow,
    "no_staging": _no_staging,
}
