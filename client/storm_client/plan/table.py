"""What a plan is for people: a table of what becomes of each value, and a picture of a step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from storm_client.errors import UsageError
from storm_client.plan.decisions import Keep, Offload, Replay
from storm_client.plan.kinds import Kind
from storm_client.plan.planner import Choice
from storm_client.sizes import format_size

__all__ = ["Plan", "Row"]


@dataclass(frozen=True, slots=True)
class Row:
    """One saved tensor's storage, or one that is stored for others to be made from."""

    operation: str
    """The function that made it, "unknown" where none was seen."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    decision: str
    """"keep", "offload" or "replay"."""
    reason: str
    cost: float
    """Seconds: of the replay, or of the link one way."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The decisions for one kind of step, in the order in which their values were made."""

    rows: tuple[Row, ...]
    peak_bytes: int
    """Of saved tensors that stay on the device by decision, at the end of the forward pass."""
    link_seconds: float
    """Of the link in one direction, a step."""
    replay_seconds: float
    """Of operations that are run again, a step."""
    forward_seconds: float
    """Of the forward pass as it was timed; before that, of its operations together."""

    @classmethod
    def of(cls, kind: Kind, choice: Choice) -> Plan:
        """Describe what was chosen for a kind of step."""
        rows = []
        for value, decision, reason, cost in zip(
            kind.values, choice.decisions, choice.reasons, choice.costs, strict=True
        ):
            if not (value.is_saved or isinstance(decision, Replay) or cost):
                continue
            why = kind.rejected.get(value.number, reason)
            rows.append(
                Row(
                    value.operation or "unknown",
                    tuple(value.shape),
                    value.dtype,
                    value.nbytes,
                    _NAMES[type(decision)],
                    why,
                    cost,
                )
            )
        return cls(
            tuple(rows),
            choice.kept_bytes,
            choice.link_seconds,
            choice.replay_seconds,
            choice.forward_seconds,
        )

    def __str__(self) -> str:
        """Return a table, one line for rows that are alike, and sums below it."""
        alike = Counter(self.rows)
        lines = [f"{'operation':<28} {'shape':<24} {'bytes':>10}  {'decision':<8} {'ms':>8}  why"]
        for row, count in alike.items():
            shape = "x".join(map(str, row.shape)) + f" {str(row.dtype).removeprefix('torch.')}"
            name = f"{count} x {row.operation}"
            lines.append(
                f"{name:<28} {shape:<24} {format_size(row.nbytes * count):>10}  "
                f"{row.decision:<8} {1e3 * row.cost * count:>8.2f}  {row.reason}"
            )
        for decision in ("keep", "offload", "replay"):
            nbytes = sum(row.nbytes for row in self.rows if row.decision == decision)
            lines.append(f"{decision:<8} {format_size(nbytes):>10}")
        lines.append(
            f"link {1e3 * self.link_seconds:.1f} ms each way, replay "
            f"{1e3 * self.replay_seconds:.1f} ms, forward {1e3 * self.forward_seconds:.1f} ms"
        )
        return "\n".join(lines)

    def draw(self, path: str | Path) -> None:
        """Draw a step: bytes that are kept, on the link and made again, value by value.

        Raises:
            UsageError: matplotlib is missing, or does not know the kind of file.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise UsageError(
                "Plan.draw needs matplotlib: pip install matplotlib, or print the plan"
            ) from error
        figure = Figure(figsize=(9, 5), layout="constrained")
        stacked, spent = figure.subplots(2, 1, sharex=True)
        self._draw_bytes(stacked)
        self._draw_seconds(spent)
        try:
            figure.savefig(path)
        except ValueError as error:
            raise UsageError(f"cannot draw to {str(path)!r}: {error}") from error

    def _draw_bytes(self, axes: object) -> None:
        totals: dict[str, list[float]] = {"keep": [0.0], "offload": [0.0], "replay": [0.0]}
        for row in self.rows:
            for decision, sums in totals.items():
                sums.append(sums[-1] + (row.nbytes / 2**30 if row.decision == decision else 0.0))
        axes.stackplot(range(len(self.rows) + 1), *totals.values(), labels=list(totals))  # type: ignore[attr-defined]
        axes.legend(loc="upper left")  # type: ignore[attr-defined]
        axes.set_ylabel("GiB made so far")  # type: ignore[attr-defined]

    def _draw_seconds(self, axes: object) -> None:
        for decision, label in (("offload", "link, each way"), ("replay", "replay")):
            sums = [0.0]
            for row in self.rows:
                sums.append(sums[-1] + (1e3 * row.cost if row.decision == decision else 0.0))
            axes.plot(sums, label=label)  # type: ignore[attr-defined]
        axes.axhline(1e3 * self.forward_seconds, linestyle=":", label="forward pass")  # type: ignore[attr-defined]
        axes.legend(loc="upper left")  # type: ignore[attr-defined]
        axes.set_ylabel("ms so far")  # type: ignore[attr-defined]
        axes.set_xlabel("values in the order in which they are made")  # type: ignore[attr-defined]


_NAMES = {Keep: "keep", Offload: "offload", Replay: "replay"}
