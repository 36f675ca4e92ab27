"""One worker as the front sees it: what it was given, and what it has said."""

from __future__ import annotations

import subprocess
from enum import Enum, auto
from typing import Any

from stormd.lanes import Post
from stormd.lanes.none import NoLane
from stormd.monitoring.counters import Counters
from stormd.workers.line import Line
from stormd.workers.plan import Plan

__all__ = ["Phase", "Worker"]


class Phase(Enum):
    """What becomes of a worker."""

    STARTING = auto()
    """Its process is there; what is sent waits until it serves."""
    SERVING = auto()
    ENDED = auto()
    """There is no process: another is started, unless all are to end."""


class Worker(NoLane):
    """One worker, and the lane in whose place it stands for the front's ledger."""

    def __init__(self, plan: Plan, post: Post, places: dict[int, int]) -> None:
        super().__init__(post)
        self.plan = plan
        self._places = places
        self.phase = Phase.ENDED
        self.process: subprocess.Popen[bytes] | None = None
        self.line: Line | None = None
        self.starts = 0
        self.began = 0.0
        self.delay = 0.0
        self.trouble = ""
        """Why it could not be started last."""
        self.sessions: set[int] = set()
        """Handed over, and not told to have ended."""
        self.ending: set[int] = set()
        """Those of them that the front has ended."""
        self.state: dict[str, Any] | None = None
        self.counters: Counters | None = None
        self.silent_ticks = 0
        self.asked = self.answered = 0
        """The rounds in which it was asked how it is, and has said so."""
        self.pinned = (0, 0)

    def hand_over(
        self, session: int, uid: int, frame: bytes, connection: tuple[int, bytes]
    ) -> None:
        """Have the worker go on with a connection whose Hello is in `frame`."""
        descriptor, unread = connection
        assert self.line is not None, "a session was given to a worker that has ended"
        self.sessions.add(session)
        place = self._places.setdefault(uid, len(self._places))
        self.line.send("session", session, uid, place, frame, unread, descriptor=descriptor)

    def detach(self, session: int) -> None:
        """Have the worker end a session; Detached follows once it has."""
        if session not in self.sessions:
            super().detach(session)
            return
        self.ending.add(session)
        if self.line is not None:
            self.line.send("end", session)

    def ended(self, session: int) -> bool:
        """Note that a session is gone there; False where the front has ended it, and waits."""
        self.sessions.discard(session)
        if session in self.ending:
            self.ending.discard(session)
            super().detach(session)
            return False
        return True

    def take_state(self, state: dict[str, Any]) -> None:
        """Note how it says it is."""
        self.state = state
        self.counters = Counters.of(state["counters"])

    def as_status(self) -> dict[str, Any]:
        """Return what is shown of it."""
        own = (self.state or {}).get("worker", {})
        return {
            "index": self.plan.index,
            "pid": 0 if self.process is None else self.process.pid,
            "devices": [f"cuda:{one}" for one in self.plan.ordinals] or ["cpu"],
            "uuids": list(self.plan.uuids),
            "phase": self.phase.name.lower(),
            "starts": self.starts,
            "trouble": self.trouble,
            "sessions": len(self.sessions),
            "numa_node": own.get("numa_node", -1),
            "processor_seconds": own.get("processor_seconds", 0.0),
            "pool": (self.state or {}).get("status", {}).get("pool"),
        }
