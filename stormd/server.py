"""The daemon: opens the pool, the lanes and the sockets, serves, and ends in order.

It has one of three roles. A single daemon serves all devices. The front of worker processes has the
address, grants sessions, and serves only the cache itself. A worker serves the sessions that the
front passes to it.

`open` either makes a daemon that answers or leaves nothing behind. `close` ends by its deadline, in
a fixed order. The pool is not unmapped while a worker thread may use it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

from stormd import open_files
from stormd.address import Address
from stormd.cache.items import Cache
from stormd.config import Config
from stormd.errors import LaneUnavailable
from stormd.gateway import Dispatch, Gateway, Opening, Terms
from stormd.handover import Handover
from stormd.lanes import Lane
from stormd.lanes.opening import open_lanes, served_uuids
from stormd.ledger.events import Result
from stormd.ledger.ledger import Ledger
from stormd.ledger.records import JournalRecords, Records, Totals
from stormd.memory.arena import Space
from stormd.memory.growth import FIRST_BYTES, PoolGrowth
from stormd.memory.host_pool import HostPool
from stormd.memory.shared_rows import PoolBudget
from stormd.monitoring.counters import Counters
from stormd.monitoring.health import stuck_workers
from stormd.monitoring.nvml import GpuGauge
from stormd.protocol import NO_LANE, parse_address, worker_lifeline_path
from stormd.protocol.zmtp import framed
from stormd.provision import (
    adopted_spaces,
    allowed_uids,
    bytes_beside_pool,
    cache_chunk_bytes,
    limits_of,
    near_gpu,
)
from stormd.session_ender import DETACH_SECONDS, SessionEnder
from stormd.settings import reloaded
from stormd.spill.opening import OpenTier, check_tier, open_tier
from stormd.state import merged_status, state
from stormd.transport.control import ControlSocket
from stormd.transport.lifeline import LifelineListener
from stormd.transport.mailbox import Mailbox
from stormd.workers.fleet import Fleet
from stormd.workers.plan import WorkerPlace, front_config, plan_workers

__all__ = ["Server"]

log = logging.getLogger(__name__)

TICK_SECONDS: Final = 0.5
FIRST_CLIENT_SECONDS: Final = 60.0
"""How long a daemon that ends with its last client waits for its first client."""


class Server:
    """One daemon on the running event loop: `open`, `serve`, `close`, each once.

    `on_progress(done, total)`, in bytes, is called from other threads while the pool is made. With
    a `handover`, stored entries outlive the daemon. With a `worker` place, the daemon is a worker.
    """

    def __init__(
        self,
        config: Config,
        *,
        on_progress: Callable[[int, int], None] | None = None,
        handover: Handover | None = None,
        worker: WorkerPlace | None = None,
    ) -> None:
        self._requested_config = config
        self._config = config  # as it applies to this process
        self._handover = handover
        self._worker = worker
        self._fleet: Fleet | None = None
        self._records: JournalRecords | None = None
        self.is_suspended = False
        """Whether another daemon is to follow and continue with this one's sessions."""
        self._on_progress = on_progress
        self._cleanup = ExitStack()
        self._counters = Counters()
        self._opened_at = time.monotonic()
        self._is_open = False
        self._seconds: dict[str, float] = {}  # that parts of the start took
        self._loop: asyncio.AbstractEventLoop
        self._stopping: asyncio.Event
        self._progress: asyncio.Event
        self._pool: HostPool
        self._spaces: list[Space]
        self._growth: PoolGrowth
        self._cache: Cache | None = None
        self._ledger: Ledger
        self._lanes: dict[str, Lane]
        self._spill: OpenTier | None = None
        self._spill_fault = ""
        self._gauge: GpuGauge
        self._mailbox: Mailbox[Result]
        self._gateway: Gateway
        self._address: Address
        self._control: ControlSocket
        self._lifelines: LifelineListener
        self._ending: SessionEnder

    async def open(self) -> None:
        """Make the pool, open the lanes, and bind the sockets; afterwards clients are served.

        Raises:
            StartStopped: `stop` was called before the pool was made.
            StormdError: one of errors.py, by whose fault it is; nothing is left behind.
        """
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        self._progress = asyncio.Event()
        self._mailbox = Mailbox(self._loop)
        try:
            self._read_earlier_state()
            self._take_address()
            for name, part in self._slow_steps().items():
                begun = time.monotonic()
                await part()
                self._seconds[name] = round(time.monotonic() - begun, 3)
            self._bind()
        except BaseException:
            self._cleanup.close()
            raise
        self._is_open = True

    def log_ready(self) -> None:
        """Log that all is there that users and operators call; `open` comes before."""
        lanes = list(self.status()["lanes"])
        shown = {"address": self._config.address, "lanes": lanes, "seconds": self._seconds}
        log.info("ready", extra=shown)

    async def serve(self) -> None:
        """Serve until `stop` or `suspend`, or, if configured so, until the last client has gone.

        Raises:
            StormdError: the files of the address were removed and cannot be created again; or a
                device is broken, and nothing outlives this daemon. The caller must still call
                `close`.
        """
        while not self._stopping.is_set():
            try:
                async with asyncio.timeout(TICK_SECONDS):
                    await self._stopping.wait()
            except TimeoutError:
                self._gateway.tick()
                if self._fleet is not None:
                    self._fleet.tick()
                self._ending.end_orphans(self._config.resume_seconds)
                self._growth.grow_if_due()
                self._note_totals()
                self._watch_spill()
                self._watch_lanes()
                self._address.rebind()
            if self._config.exit_with_last_client and self._is_deserted():
                return

    def stop(self) -> None:
        """Ask `serve` to return. Callable from any thread or a signal handler; twice is fine."""
        self._loop.call_soon_threadsafe(self._stopping.set)

    def suspend(self) -> bool:
        """Ask `serve` to return, and keep all sessions and entries for the next daemon.

        To be called on the event loop. Returns False if nothing can outlive this daemon, which then
        continues to serve.
        """
        if self._handover is None:
            return False
        self.is_suspended = True
        self._stopping.set()
        return True

    def reload(self, config: Config) -> list[str]:
        """Apply the reloadable settings of `config`; existing sessions stay as they are.

        Returns the names of the other settings that differ: they need a restart.

        Raises:
            ConfigError: the new limits do not fit the existing pool; nothing has changed.
        """
        fresh, ignored = reloaded(self._requested_config, config)
        own = fresh if self._fleet is None else front_config(fresh)
        if self._fleet is not None:
            self._fleet.reload(fresh)
        self._requested_config, self._config = fresh, own
        self._ledger.limit(limits_of(own))
        self._gateway.allow(allowed_uids(own))
        for lane in self._lanes.values():
            lane.limit_link(own.link_limit_bytes)
        return ignored

    def take_session(self, line: socket.socket, session: int, frame: bytes, unread: bytes) -> bool:
        """As a worker, take over a connection to which the front has granted a session.

        `frame` has its Hello, `unread` the bytes received after it. Returns False if no session was
        opened; its client was told why. Call it on the event loop, once the worker is open.
        """
        self._control.continue_connection(line, session, framed(frame) + unread)
        return session in self._ledger.sessions

    def end_session(self, session: int) -> None:
        """As a worker, end a session that the front no longer wants."""
        self._gateway.end(session, "unattached")

    async def close(self) -> None:
        """End in order, by the deadline of the config, whatever the clients do.

        Does nothing if `open` failed or the daemon has ended already.

        1. Accept no new session and no new entry, and refuse such requests. Workers do the same.
        2. Let clients fetch their stored entries, until none is left or time is short.
        3. End the sessions: lanes finish running work, skip waiting work, and free the memory.
        4. Close the lifelines and the control socket, remove their files.
        5. Stop growing the pool, end the threads of lanes and disk, unmap the pool, and release the
           address.

        A suspended daemon takes the first three steps only for sessions that the next daemon cannot
        resume, and does not remove the files of the sockets.
        """
        if not self._is_open:
            return
        self._is_open = False
        try:
            if self.is_suspended:
                await self._ending.end_unresumable(self._config.shutdown_seconds)
                self._suspend()
            else:
                self._lifelines.listener.close()
                await self._ending.end_all(self._config.shutdown_seconds)
                self._mailbox.close()
                if self._handover is not None:
                    self._handover.forget_all()
        finally:  # whatever has failed: no socket and no lock may outlive the daemon
            self._cleanup.close()
        log.info("ended")

    def stuck(self) -> list[str]:
        """Return a sentence for each worker thread that hangs or has ended. On the loop only."""
        return stuck_workers([one for lane in self._lanes.values() for one in lane.heartbeats])

    @property
    def counters(self) -> Counters:
        """The counts since the start, of all processes. On the event loop only."""
        return self._counters if self._fleet is None else self._fleet.counters(self._counters)

    def status(self) -> dict[str, Any]:
        """Return the state as `stormd status --json` prints it. On the event loop only.

        The figures of worker processes are from their last reports, at most half a second old.
        """
        own = state(
            config=self._config,
            opened_at=self._opened_at,
            is_resumable=self._handover is not None,
            earlier=Totals() if self._handover is None else self._handover.earlier,
            pool=self._pool,
            space=self._spaces[0],
            cache=self._cache,
            ledger=self._ledger,
            lanes=self._lanes,
            gauge=self._gauge,
            counters=self._counters,
        )
        if (fleet := self._fleet) is None:
            return own
        return merged_status(
            own, fleet.states(), self.counters, fleet.status(), self._requested_config.pool_bytes
        )

    def _provide_status(self, tell: Callable[[dict[str, Any]], None]) -> None:
        """Call `tell` with the state of all processes, as last reported."""
        if self._worker is not None:
            self._worker.provide_status(tell)
        else:
            tell(self.status())

    # --- parts of open, in order ------------------------------------------------------------

    def _read_earlier_state(self) -> None:
        """Read an earlier daemon's state, if any; its settings of the pool then stay in force."""
        if self._handover is not None:
            self._cleanup.callback(self._handover.close)
            self._config = self._handover.take(self._config)

    def _take_address(self) -> None:
        lifeline = None if self._worker is None else self._worker.lifeline
        self._address = Address(self._config, self._handover, lifeline)
        self._cleanup.callback(self._address.close)
        self._address.take()

    def _slow_steps(self) -> dict[str, Callable[[], Awaitable[object]]]:
        """Return the slow steps of the start, in order, by their names in the log."""
        return {
            "device": partial(asyncio.to_thread, self._check_machine),
            "workers": self._start_workers,
            "pool": self._make_pool,
            "lanes": self._open_lanes,
            "disk": self._open_spill,
        }

    def _check_machine(self) -> None:
        """Report what the machine lacks before memory is taken: pinning takes a while."""
        devices = ["cpu", "cuda"] if served_uuids(self._config) else ["cpu"]
        check_tier(self._config, devices)

    async def _start_workers(self) -> None:
        """If worker processes are to serve the devices, start them, and become their front."""
        plans = [] if self._worker else await asyncio.to_thread(plan_workers, self._config)
        if not plans:
            return
        self._fleet = Fleet(
            self._config,
            plans,
            loop=self._loop,
            post=self._mailbox.post,
            lifeline_of=partial(worker_lifeline_path, parse_address(self._config.address)),
            on_session=lambda *report: self._gateway.take_report(*report),  # noqa: PLW0108 - not made yet
            status=self.status,
            on_change=self._progress.set,
            on_progress=self._on_progress,
        )
        self._cleanup.callback(self._fleet.kill)
        self._config = front_config(self._config)
        await self._fleet.open(self._stopping)

    @property
    def _budget(self) -> PoolBudget | None:
        """The limit of this worker's part of a pool that all workers share; else None."""
        return None if self._worker is None else self._worker.budget

    async def _make_pool(self) -> None:
        spaces, kept = adopted_spaces(self._config, self._handover)
        config, handover, first = self._config, self._handover, self._config.host_bytes
        if config.pool_commit == "use":
            first = min(FIRST_BYTES, spaces[0].end)
        budget = self._budget
        if budget is not None:
            first = budget.first
            granted = budget.claim(first)
            assert granted == first, "others leave the first bytes"
        make = partial(
            HostPool,
            config.host_bytes,
            first=first,
            beside=bytes_beside_pool(config),
            descriptor=-1 if handover is None else handover.pool_file(config.host_bytes),
            kept=kept,
            on_progress=self._on_progress,
            is_stopped=self._stopping.is_set,
        )
        if self._worker is None:  # a worker's process has its NUMA node already
            make = partial(near_gpu, config, make)
        self._pool = await asyncio.to_thread(make)
        self._cleanup.callback(self._pool.close)
        if not kept:
            for space in spaces:
                space.grow(max(0, min(first, space.end) - space.base))
        self._spaces = spaces
        if handover is not None:
            self._records = handover.records()
        if config.cache_bytes:
            self._cache = Cache(spaces[1], self._counters.cache, self._records or Records())

    async def _open_lanes(self) -> None:
        self._cleanup.callback(self._mailbox.close)
        self._lanes = await asyncio.to_thread(
            open_lanes,
            self._config,
            self._pool,
            self._mailbox.post,
            None if self._worker is None else self._worker.ordinals,
        )
        for lane in self._lanes.values():
            self._cleanup.callback(self._end_threads, f"the {lane.device} lane", lane.close)
        self._growth = PoolGrowth(
            self._pool,
            self._spaces,
            self._lanes.values(),
            self._loop,
            self._grown,
            budget=self._budget,
        )
        self._cleanup.callback(self._growth.close)
        uuids = [link.uuid for lane in self._lanes.values() for link in lane.links]
        self._gauge = await asyncio.to_thread(GpuGauge, uuids)
        self._cleanup.callback(self._gauge.close)

    async def _open_spill(self) -> None:
        if not self._config.spill_path:
            return
        self._spill = await asyncio.to_thread(
            open_tier, self._config, self._pool, list(self._lanes), self._mailbox.post
        )
        self._cleanup.callback(self._end_threads, "the tier on disk", self._spill.tier.close)

    def _bind(self) -> None:
        spill = self._spill
        self._ledger = Ledger(
            self._spaces[0],
            limits_of(self._config),
            self._counters,
            self._cache,
            self._records,
            disk=None if spill is None else spill.disk,
            totals=None if self._worker is None else self._worker.totals,
        )
        if self._handover is not None:
            self._handover.adopt(self._ledger, self._cache)
        self._control = self._address.bind_control(self._loop)
        self._cleanup.callback(self._control.close)
        self._gateway = gateway = self._make_gateway()
        self._mailbox.start(gateway.take_results)
        self._lifelines = self._address.bind_lifelines(
            self._loop, gateway.take_token, gateway.take_piece, partial(gateway.end, cause="died")
        )
        self._cleanup.callback(self._lifelines.close)
        self._ending = SessionEnder(self._ledger, gateway, self._fleet, self._progress)
        if self._handover is not None:
            self._handover.keep_memory(self._config, self._spaces)
        self._address.open_to_users()
        open_files.check_room()
        gateway.start(self._lifelines, allowed_uids(self._config))

    def _make_gateway(self) -> Gateway:
        config, worker = self._config, self._worker
        dispatch = Dispatch(
            ledger=self._ledger,
            counters=self._counters,
            control=self._control,
            on_progress=self._progressed,
            later=self._loop.call_later,
            on_session=None if worker is None else worker.on_session,
            move=None if self._spill is None else self._spill.tier.begin,
        )
        opening = Opening(
            dispatch,
            lanes={**self._lanes, NO_LANE: Lane(self._mailbox.post)},
            terms=Terms(
                lifeline_path=str(self._address.lifeline),
                cache_chunk_bytes=cache_chunk_bytes(config),
                lease_seconds=config.lease_seconds,
                resume_seconds=0.0 if self._records is None else config.resume_seconds,
                epoch=0 if self._records is None else self._records.epoch,
            ),
            provide_status=self._provide_status,
            fleet=self._fleet,
        )
        return Gateway(dispatch, opening)

    # --- parts of serving and closing -------------------------------------------------------

    def _note_totals(self) -> None:
        if self._handover is not None:
            self._handover.record_totals(self.counters.throughput()["store"])

    def _watch_spill(self) -> None:
        """End the tier on disk if it has failed; everything else continues."""
        fault = "" if self._spill is None else self._spill.tier.fault()
        if fault and not self._spill_fault:
            self._spill_fault = fault
            self._gateway.end_tier(fault)
            log.error("the tier on disk has ended: %s; what was there alone is lost", fault)

    def _watch_lanes(self) -> None:
        """End this daemon if a device is broken: only another process can use that device again.

        The daemon is suspended if it can be. A worker continues until the front, which gets its
        reports, kills it.

        Raises:
            LaneUnavailable: a device is broken, and nothing outlives this daemon.
        """
        fault = "; ".join(lane.fault for lane in self._lanes.values() if lane.fault)
        if not fault or self._worker is not None or self.suspend():
            return
        raise LaneUnavailable(f"a device is broken: {fault}. Start the daemon again")

    def _progressed(self) -> None:
        self._progress.set()
        self._growth.grow_if_due()

    def _grown(self) -> None:
        """Retry requests that wait for memory: there is more of it, or no more can be had."""
        if self._handover is not None:
            self._handover.record_layout(self._config, self._spaces)
        self._gateway.retry_waiting()

    def _is_deserted(self) -> bool:
        if self._ledger.sessions:
            return False
        uptime = time.monotonic() - self._opened_at
        return self._counters.sessions > 0 or uptime > FIRST_CLIENT_SECONDS

    def _suspend(self) -> None:
        """Stop listening to clients and lanes, and leave all sessions to the next daemon.

        From here on no session ends and nothing is freed, as the journal would not record it.
        """
        self._mailbox.close()
        self._gateway.suspend()
        self._note_totals()
        log.info("suspended", extra={"sessions": len(self._ledger.sessions)})

    def _end_threads(self, whose: str, close: Callable[[float], bool]) -> None:
        """End threads that use the pool; if one does not end, the pool stays mapped."""
        if not close(DETACH_SECONDS):
            log.error("a thread of %s does not end: the pool stays mapped", whose)
            self._pool.keep_mapped()
