"""The demo's results: each trainer with offload compared with the same trainer without.

Pure arithmetic on the reports of the trainers and the daemon. Bytes of one step are the run's bytes
divided by its steps.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from storm_bench.demo.trainers import Trained

__all__ = ["Comparison", "Report", "compare"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One trainer without offload and with it. Bytes are of one step, seconds are the median."""

    steps: int
    loss_plain: float
    loss_offload: float
    equal_losses: int
    equal_gradients: int
    saved_bytes: int
    deduplicated_bytes: int
    offloaded_bytes: int
    stored_bytes: int
    ratio: float
    recomputed_bytes: int
    kept_bytes: int
    """Kept on the device: by policy or plan, or because the daemon did not take them."""
    step_seconds_plain: float
    step_seconds_offload: float
    peak_bytes_plain: int
    peak_bytes_offload: int

    @property
    def identical(self) -> bool:
        """Whether every step's loss and every gradient agree bit for bit."""
        return self.steps > 0 and self.equal_losses == self.equal_gradients == self.steps

    @property
    def has_fallen(self) -> bool:
        """Whether peak memory fell; a small step offloads less than the client itself takes."""
        return self.peak_bytes_offload < self.peak_bytes_plain

    @property
    def peak_drop(self) -> float:
        """How much the process's peak memory fell, as a share of the bytes offloaded."""
        fallen = self.peak_bytes_plain - self.peak_bytes_offload
        return fallen / self.offloaded_bytes if self.offloaded_bytes else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return all figures as JSON values."""
        return {**asdict(self), "identical": self.identical, "peak_drop": self.peak_drop}


@dataclass(frozen=True, slots=True)
class Report:
    """The whole demo."""

    device: str
    dtype: str
    trainers: list[Comparison]
    pool_capacity_bytes: int
    pool_peak_bytes: int
    pool_left_bytes: int

    @property
    def passed(self) -> bool:
        """Whether training was identical, every trainer offloaded, and the pool ended empty."""
        offloaded = all(trainer.offloaded_bytes > 0 for trainer in self.trainers)
        same = all(trainer.identical for trainer in self.trainers)
        return bool(self.trainers) and same and offloaded and self.pool_left_bytes == 0

    def to_json(self) -> dict[str, Any]:
        """Return all figures as JSON values."""
        return {
            "passed": self.passed,
            "device": self.device,
            "dtype": self.dtype,
            "trainers": [trainer.to_json() for trainer in self.trainers],
            "pool": {
                "capacity_bytes": self.pool_capacity_bytes,
                "peak_used_bytes": self.pool_peak_bytes,
                "left_bytes": self.pool_left_bytes,
            },
        }


def compare(plain: Trained, offload: Trained, *, device: str, staging_bytes: int = 0) -> Comparison:
    """Return the comparison of two runs; on cuda, peak memory is the device's.

    The client takes at most `staging_bytes` on the device, which torch does not count.
    """
    stats = offload.stats or {}
    pairs = list(zip(plain.steps, offload.steps, strict=False))
    steps = max(len(plain.steps), len(offload.steps))

    def per_step(name: str) -> int:
        return int(stats[name]) // max(1, steps) if stats else 0

    return Comparison(
        steps=steps,
        loss_plain=plain.steps[-1].loss,
        loss_offload=offload.steps[-1].loss,
        equal_losses=sum(one.loss == two.loss for one, two in pairs),
        equal_gradients=sum(one.gradients == two.gradients for one, two in pairs),
        saved_bytes=per_step("saved_bytes"),
        deduplicated_bytes=per_step("deduplicated_bytes"),
        offloaded_bytes=per_step("offloaded_bytes"),
        stored_bytes=per_step("stored_bytes"),
        ratio=float(stats.get("ratio", 0.0)),
        recomputed_bytes=per_step("replayed_bytes"),
        kept_bytes=per_step("skipped_bytes") + per_step("kept_bytes"),
        step_seconds_plain=median(step.seconds for step in plain.steps),
        step_seconds_offload=median(step.seconds for step in offload.steps),
        peak_bytes_plain=_peak(plain, device),
        peak_bytes_offload=_peak(offload, device) + staging_bytes,
    )


def _peak(trained: Trained, device: str) -> int:
    return trained.device_peak_bytes if device == "cuda" else trained.peak_bytes
