"""The daemon: opens the pool, the lanes and the sockets, serves, and ends in order.

It is one of three: alone, with all devices; the front of worker processes, which has the address
and grants sessions, and serves the cache alone; or a worker, which has sessions handed to it.

`open` leaves either a daemon that answers or nothing behind. `close` ends by its deadline, in a
fixed order, and nothing of the pool is unmapped while a worker may use it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from stormd import open_files
from stormd.cache.items import Cache, Item
from stormd.config import Config, reloaded
from stormd.errors import DirectoryUnsafe, remedy
from stormd.gateway import ATTACHED, Gateway, Terms
from stormd.handover import CONTROL, LIFELINES, Handover, layout_of
from stormd.lanes import Lane
from stormd.lanes.none import NoLane
from stormd.lanes.opening import open_lanes
from stormd.ledger.events import Result
from stormd.ledger.ledger import Ledger
from stormd.ledger.records import JournalRecords, NoRecords, Totals
from stormd.ledger.sessions import Session, session_name
from stormd.memory.arena import Space
from stormd.memory.growth import FIRST_BYTES, PoolGrowth
from stormd.memory.host_pool import HostPool
from stormd.monitoring.counters import Counters
from stormd.monitoring.gpu_gauge import GpuGauge
from stormd.monitoring.health import stuck_workers
from stormd.protocol import NO_LANE, lifeline_path, parse_address, worker_lifeline_path
from stormd.provision import (
    adopted_spaces,
    allowed_uids,
    bytes_beside_pool,
    cache_part_bytes,
    limits_of,
)
from stormd.runtime_directory import AddressLock, grant, prepare_directory, remove_stale
from stormd.spill.opening import OpenTier, open_tier
from stormd.state import state
from stormd.transport.control import ControlSocket
from stormd.transport.lifeline import LifelineListener
from stormd.transport.mailbox import Mailbox
from stormd.transport.zmtp import framed
from stormd.workers.fleet import Fleet
from stormd.workers.merged import merged_status
from stormd.workers.plan import WorkerPlace, front_config, plan_workers
from stormd.workers.shared import PoolBudget

__all__ = ["Server"]

log = logging.getLogger(__name__)

TICK_SECONDS: Final = 0.5
FIRST_CLIENT_SECONDS: Final = 60.0
"""How long a daemon that ends with its last client waits for its first."""

DETACH_SECONDS: Final = 2.0
"""Part of the shutdown's time kept for lanes to finish, out of what clients get to fetch theirs;
at most half of it."""


class Server:
    """One daemon on the running event loop: `open`, `serve`, `close`, each once.

    `on_progress(done, total)` is called from other threads while the pool is made, in bytes. With a
    `handover` what is stored outlives the daemon. With a place as `worker` it is one.
    """

    def __init__(
        self,
        config: Config,
        *,
        on_progress: Callable[[int, int], None] | None = None,
        handover: Handover | None = None,
        worker: WorkerPlace | None = None,
    ) -> None:
        self._asked = config
        self._config = config  # what of it is this process's
        self._handover = handover
        self._worker = worker
        self._fleet: Fleet | None = None
        self._records: JournalRecords | None = None
        self._noted = Totals()
        self._is_suspended = False
        self._on_progress = on_progress
        self._socket = parse_address(config.address)
        self._cleanup = ExitStack()
        self._counters = Counters()
        self._opened_at = time.monotonic()
        self._is_open = False
        self._loop: asyncio.AbstractEventLoop
        self._stopping: asyncio.Event
        self._progress: asyncio.Event
        self._pool: HostPool
        self._spaces: list[Space]
        self._growth: PoolGrowth
        self._space: Space
        self._cache: Cache | None = None
        self._ledger: Ledger
        self._lanes: dict[str, Lane]
        self._spill: OpenTier | None = None
        self._spill_fault = ""
        self._gauge: GpuGauge
        self._mailbox: Mailbox[Result]
        self._gateway: Gateway
        self._lock: AddressLock
        self._left: dict[Path, socket.socket | None]  # of an earlier daemon's, by their paths
        self._control: ControlSocket
        self._lifelines: LifelineListener

    async def open(self) -> None:
        """Make the pool, open the lanes, bind the sockets: afterwards clients are served.

        Raises:
            StartStopped: `stop` was called before the pool was there.
            StormdError: by whose fault it is, one of errors.py; nothing is left behind.
        """
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        self._progress = asyncio.Event()
        self._mailbox = Mailbox(self._loop)
        try:
            self._take_over()
            self._take_address()
            await self._start_workers()
            await self._make_pool()
            await self._open_lanes()
            await self._open_spill()
            self._bind()
        except BaseException:
            self._cleanup.close()
            raise
        self._is_open = True
        if self._worker is None:  # of a worker the front tells
            lanes = list(self.status()["lanes"])
            log.info("ready", extra={"address": self._config.address, "lanes": lanes})

    async def serve(self) -> None:
        """Serve until `stop`, or until the last client has gone where the config says so.

        Raises:
            StormdError: the files of the address were removed, and it cannot be had again. What is
                open is served; `close` must follow.
        """
        while not self._stopping.is_set():
            try:
                async with asyncio.timeout(TICK_SECONDS):
                    await self._stopping.wait()
            except TimeoutError:
                self._gateway.tick()
                if self._fleet is not None:
                    self._fleet.tick()
                self._end_orphans()
                self._growth.look()
                self._note_totals()
                self._watch_spill()
                self._keep_address()
            if self._config.exit_with_last_client and self._is_deserted():
                return

    def stop(self) -> None:
        """Ask `serve` to return. From any thread or a signal handler; twice is fine."""
        self._loop.call_soon_threadsafe(self._stopping.set)

    def suspend(self) -> bool:
        """Ask `serve` to return, and have what is held stay for the daemon that follows.

        From the loop; False where nothing outlives this daemon, which goes on then.
        """
        if self._handover is None:
            return False
        self._is_suspended = True
        self._stopping.set()
        return True

    @property
    def is_suspended(self) -> bool:
        """Whether another daemon is to follow, with what is held."""
        return self._is_suspended

    def reload(self, config: Config) -> list[str]:
        """Take the reloadable settings of `config`; the sessions there are stay as they are.

        Returns the names of the other settings that differ: they need a restart.

        Raises:
            ConfigError: the new limits do not go with the pool there is; nothing has changed.
        """
        fresh, ignored = reloaded(self._asked, config)
        own = fresh if self._fleet is None else front_config(fresh)
        if self._fleet is not None:
            self._fleet.reload(fresh)
        self._asked, self._config = fresh, own
        self._ledger.limit(limits_of(own))
        self._gateway.allow(allowed_uids(own))
        return ignored

    def take_session(self, line: socket.socket, session: int, frame: bytes, unread: bytes) -> bool:
        """Go on with a connection that the front has granted a session, as a worker.

        `frame` has its Hello, `unread` what came behind that. False where there is no session: its
        client was told why. On the event loop, once the worker is open.
        """
        self._control.take(line, session, framed(frame) + unread)
        return session in self._ledger.sessions

    def end_session(self, session: int) -> None:
        """End a session that the front wants no longer, as a worker."""
        self._gateway.end(session, "unattached")
        self._gateway.flush()

    async def close(self) -> None:
        """End in order, by the deadline of the config, whatever the clients do.

        Does nothing where `open` failed or the daemon has ended already.

        1. Take no new session and no new entry; say so to those who ask. Workers do the same.
        2. Let clients fetch what they have stored, until nothing is held or time is short.
        3. End the sessions: lanes finish what runs, skip what waits, and let their memory go.
        4. Close the lifelines and the control socket, remove their files.
        5. Grow the pool no more, end the workers of lanes and disk, unmap the pool, and give the
           address up.

        One that was suspended does the first three for sessions alone that no other can go on with,
        and leaves the files of the sockets where they are.
        """
        if not self._is_open:
            return
        self._is_open = False
        try:
            if self._is_suspended:
                await self._end_others(time.monotonic() + self._config.shutdown_seconds)
                self._leave()
            else:
                await self._end_sessions(time.monotonic() + self._config.shutdown_seconds)
        finally:  # whatever has failed: no socket and no lock may outlive the daemon
            self._cleanup.close()
        log.info("ended")

    def stuck(self) -> list[str]:
        """Return one sentence for each worker that hangs or has ended. On the event loop only."""
        heartbeats = [heartbeat for lane in self._lanes.values() for heartbeat in lane.heartbeats]
        return stuck_workers(heartbeats)

    @property
    def counters(self) -> Counters:
        """The counts since the start, of all processes. On the event loop only."""
        return self._counters if self._fleet is None else self._fleet.counters(self._counters)

    def status(self) -> dict[str, Any]:
        """Return the state as `stormd status --json` prints it. On the event loop only.

        What workers do is known as they have said last, half a second ago at the most.
        """
        own = self._own_status()
        fleet = self._fleet
        if fleet is None:
            return own
        return merged_status(
            own, fleet.states(), self.counters, fleet.status(), self._asked.pool_bytes
        )

    def _tell_status(self, tell: Callable[[dict[str, Any]], None]) -> None:
        """Hand the state of all processes over, once workers have said how they are."""
        if self._worker is not None:
            self._worker.tell_status(tell)
        elif self._fleet is None:
            tell(self.status())
        else:
            self._fleet.refresh(lambda: tell(self.status()))

    def _own_status(self) -> dict[str, Any]:
        return state(
            config=self._config,
            opened_at=self._opened_at,
            is_resumable=self._handover is not None,
            earlier=Totals() if self._handover is None else self._handover.earlier,
            pool=self._pool,
            space=self._space,
            cache=self._cache,
            ledger=self._ledger,
            lanes=self._lanes,
            gauge=self._gauge,
            counters=self._counters,
        )

    # --- parts of open, in order ------------------------------------------------------------

    def _take_over(self) -> None:
        """Read what an earlier daemon has left, whose settings of the pool stay then."""
        if self._handover is not None:
            self._cleanup.callback(self._handover.close)
            self._config = self._handover.take(self._config)

    def _take_address(self) -> None:
        if self._worker is not None:  # the address is the front's
            self._left = {}
            remove_stale(self._worker.lifeline)
            return
        self._prepare_directory()
        self._lock = AddressLock(self._socket)
        self._cleanup.callback(self._lock.close)
        self._left = {
            path: None if self._handover is None else self._handover.listening(name, path)
            for name, path in zip((CONTROL, LIFELINES), self._paths, strict=True)
        }
        for path, listening in self._left.items():
            if listening is None:
                remove_stale(path)

    @property
    def _paths(self) -> tuple[Path, Path]:
        """The files of the control socket and of the lifelines'; of a worker's the last alone."""
        if self._worker is not None:
            return self._socket, self._worker.lifeline
        return self._socket, lifeline_path(self._socket)

    async def _start_workers(self) -> None:
        """Where worker processes are to serve the devices, start them, and be their front."""
        if self._worker is not None:
            return
        plans = await asyncio.to_thread(plan_workers, self._config)
        if not plans:
            return
        self._fleet = Fleet(
            self._config,
            plans,
            loop=self._loop,
            post=self._mailbox.post,
            lifeline_of=lambda index: worker_lifeline_path(self._socket, index),
            on_session=self._hear_of_session,
            tell_status=self._tell_status,
            on_change=self._progress.set,
            on_progress=self._on_progress,
        )
        self._cleanup.callback(self._fleet.kill)
        self._config = front_config(self._config)
        await self._fleet.open(self._stopping)

    def _prepare_directory(self) -> None:
        config = self._config
        prepare_directory(
            self._socket.parent, socket_mode=config.socket_mode, group=config.socket_group
        )

    @property
    def _budget(self) -> PoolBudget | None:
        """What bounds the pool beside its size: what other workers have of it."""
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
        self._pool = await asyncio.to_thread(
            HostPool,
            config.host_bytes,
            first=first,
            beside=bytes_beside_pool(config),
            descriptor=-1 if handover is None else handover.pool_file(config.host_bytes),
            kept=kept,
            on_progress=self._on_progress,
            is_stopped=self._stopping.is_set,
        )
        self._cleanup.callback(self._pool.close)
        if not kept:
            for space in spaces:
                space.grow(max(0, min(first, space.end) - space.base))
        self._space, self._spaces = spaces[0], spaces
        if handover is not None:
            self._records = handover.records()
        if config.cache_bytes:
            records = NoRecords() if self._records is None else self._records
            self._cache = Cache(spaces[1], self._counters.cache, records)

    async def _open_lanes(self) -> None:
        self._cleanup.callback(self._mailbox.close)
        self._lanes = await asyncio.to_thread(
            open_lanes,
            self._config,
            self._pool,
            self._mailbox.post,
            None if self._worker is None else self._worker.ordinals,
        )
        self._cleanup.callback(self._close_lanes)
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
        config = self._config
        if not config.spill_path:
            return
        self._spill = await asyncio.to_thread(
            open_tier, config, self._pool, list(self._lanes), self._mailbox.post
        )
        self._cleanup.callback(self._close_spill, self._spill)

    def _bind(self) -> None:
        config, spill = self._config, self._spill
        self._ledger = Ledger(
            self._space,
            limits_of(config),
            self._counters,
            self._cache,
            self._records,
            disk=None if spill is None else spill.disk,
            reserve=0 if spill is None else spill.reserve,
            totals=None if self._worker is None else self._worker.totals,
        )
        self._adopt()
        control_path, line_path = self._paths
        with _binding(control_path):
            self._control = ControlSocket(
                self._loop,
                config.address if self._worker is None else None,
                held_most=config.message_bytes,
                listening=self._left.get(control_path),
            )
        self._cleanup.callback(self._control.close)
        self._serve_on(self._control)
        with _binding(line_path):
            self._lifelines = LifelineListener(
                self._loop,
                line_path,
                listening=self._left.get(line_path),
                on_token=self._gateway.take_token,
                on_piece=self._gateway.take_piece,
                on_lost=self._gateway.lose,
            )
        self._cleanup.callback(self._lifelines.close)
        for path in self._paths if self._worker is None else (line_path,):
            grant(path, config.socket_mode, config.socket_group)
        self._have_kept()
        open_files.check_room()
        self._gateway.start(self._lifelines)

    def _adopt(self) -> None:
        """Hold what an earlier daemon has left, until its clients come."""
        if self._handover is None or self._handover.state is None:
            return
        state, now = self._handover.state, time.monotonic()
        for session in state.sessions:
            self._ledger.leases.adopt(session, now)
        for number, kept in enumerate(state.items, 1):
            assert self._cache is not None, "a layout with a cache makes one"
            item = Item(kept.label, kept.owner, kept.parts, kept.expires, number, cell=kept.cell)
            self._cache.adopt(item)
        log.info(
            "went on with what was held",
            extra={"sessions": len(state.sessions), "cached": len(state.items)},
        )

    def _have_kept(self) -> None:
        """Have the manager keep what the daemon that follows this one goes on with."""
        if self._handover is None:
            return
        self._note_layout()
        self._handover.keep_memory()
        sockets = {CONTROL: self._control.descriptor, LIFELINES: self._lifelines.descriptor}
        for path, (name, descriptor) in zip(self._paths, sockets.items(), strict=True):
            if self._left[path] is None:
                self._handover.keep_listening(name, descriptor)

    def _note_layout(self) -> None:
        if self._records is not None:
            self._records.laid_out(layout_of(self._config, self._spaces))

    def _note_totals(self) -> None:
        """Write down what has been stored by now, for whoever follows."""
        if self._records is None or self._handover is None:
            return
        stored, earlier = self.counters.throughput()["store"], self._handover.earlier
        totals = Totals(
            earlier.raw_bytes + stored["raw_bytes"], earlier.blob_bytes + stored["blob_bytes"]
        )
        if totals != self._noted:
            self._records.counted(totals)
            self._noted = totals

    def _serve_on(self, control: ControlSocket) -> None:
        config = self._config
        self._gateway = Gateway(
            ledger=self._ledger,
            counters=self._counters,
            lanes={**self._lanes, NO_LANE: NoLane(self._mailbox.post)},
            control=control,
            terms=Terms(
                allowed_uids=allowed_uids(config),
                lifeline_path=str(self._paths[1]),
                cache_part_bytes=cache_part_bytes(config),
                lease_seconds=config.lease_seconds,
                resume_seconds=0.0 if self._records is None else config.resume_seconds,
                epoch=0 if self._records is None else self._records.epoch,
            ),
            status=self._tell_status,
            on_progress=self._progressed,
            later=self._loop.call_later,
            move=None if self._spill is None else self._spill.tier.begin,
            elsewhere=self._fleet,
            on_session=None if self._worker is None else self._worker.on_session,
        )
        self._mailbox.start(self._gateway.take_results)

    # --- parts of serving and closing -------------------------------------------------------

    def _keep_address(self) -> None:
        """Bind again what was removed: nobody new would find this daemon, nor could start another.

        Raises:
            StormdError: another has the address by now, or it cannot be bound.
        """
        sockets: list[ControlSocket | LifelineListener] = [self._control, self._lifelines]
        is_locked = self._worker is not None or self._lock.is_there
        if is_locked and all(socket.is_bound for socket in sockets):
            return
        if self._worker is None:
            self._prepare_directory()
            self._lock.renew()
        for path, bound in zip(self._paths, sockets, strict=True):
            if not bound.is_bound:
                remove_stale(path)
                with _binding(path):
                    bound.bind()
                grant(path, self._config.socket_mode, self._config.socket_group)
                self._left[path] = None
        self._have_kept()
        log.warning("files of the address were removed: bound again")

    def _watch_spill(self) -> None:
        """End the tier on disk where it is of no use any more; all else goes on."""
        fault = "" if self._spill is None else self._spill.tier.fault()
        if fault and not self._spill_fault:
            self._spill_fault = fault
            self._gateway.end_tier(fault)
            log.error("the tier on disk has ended: %s; what was there alone is lost", fault)

    def _progressed(self) -> None:
        self._progress.set()
        self._growth.look()

    def _grown(self) -> None:
        """Have those go on that wait for memory, if it has come or none comes, and take more."""
        self._note_layout()
        self._gateway.go_on()

    def _end_orphans(self) -> None:
        """End the sessions of an earlier daemon whose clients are gone, or come no more."""
        now = time.monotonic()
        for record in self._ledger.leases.orphans():
            waited = now - record.seen
            if waited > self._config.resume_seconds or not _lives(record):
                fields = {"session": session_name(record.info.session), "cause": "orphaned"}
                log.info("session ended", extra=fields)
                self._gateway.end(record.info.session, "orphaned")
        self._gateway.flush()

    def _is_deserted(self) -> bool:
        if self._ledger.sessions:
            return False
        uptime = time.monotonic() - self._opened_at
        return self._counters.sessions > 0 or uptime > FIRST_CLIENT_SECONDS

    async def _end_sessions(self, deadline: float) -> None:
        """Do the first three steps of `close`."""
        kept = min(DETACH_SECONDS, self._config.shutdown_seconds / 2)
        self._lifelines.stop_listening()
        self._ledger.drain()
        fleet = self._fleet
        if fleet is not None:
            fleet.drain()
        if not await self._until(lambda: not self._ledger.entries, deadline - kept):
            log.warning("clients still hold %d entries, which are lost", self._ledger.entries)
        if fleet is not None:  # each ends its own sessions, by the same deadline
            await self._until(lambda: fleet.is_idle, deadline)
            await fleet.close(deadline)
        self._gateway.end_all("shutdown")
        if not await self._until(lambda: not self._ledger.sessions, deadline):
            log.error("%d sessions could not be ended in order", len(self._ledger.sessions))
        self._mailbox.close()
        if self._handover is not None:
            self._handover.end()

    def _hear_of_session(self, session: int, cause: str) -> None:
        """Take in what a worker says of a session."""
        if cause == ATTACHED:
            self._gateway.attached(session)
        else:
            self._gateway.end(session, cause)
            self._gateway.flush()

    async def _end_others(self, deadline: float) -> None:
        """Do the first three steps of `close` for sessions that end with this daemon."""
        others = [one for one in self._ledger.sessions.values() if not one.cell]
        if not others:
            return
        kept = min(DETACH_SECONDS, self._config.shutdown_seconds / 2)
        self._ledger.drain()
        if not await self._until(lambda: not any(one.entries for one in others), deadline - kept):
            log.warning("sessions that cannot be resumed still hold entries, which are lost")
        for record in others:
            self._gateway.end(record.info.session, "shutdown")
        self._gateway.flush()
        there = self._ledger.sessions
        await self._until(lambda: not any(one.info.session in there for one in others), deadline)

    def _leave(self) -> None:
        """Hear nobody any more, and leave all there is to the daemon that follows.

        From here on no session ends and nothing is freed: the journal says so no more.
        """
        self._mailbox.close()
        self._gateway.leave()
        self._note_totals()
        log.info("suspended", extra={"sessions": len(self._ledger.sessions)})

    async def _until(self, condition: Callable[[], bool], deadline: float) -> bool:
        """Wait until the condition holds; False where it does not by the deadline."""
        while not condition():
            self._progress.clear()
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._progress.wait()
            except TimeoutError:
                return condition()
        return True

    def _close_spill(self, spill: OpenTier) -> None:
        if not spill.tier.close(DETACH_SECONDS):
            log.error("a thread of the tier on disk does not end: the pool stays mapped")
            self._pool.keep()

    def _close_lanes(self) -> None:
        for lane in self._lanes.values():
            if not lane.close(DETACH_SECONDS):
                log.error(
                    "a worker of the %s lane does not end: the pool stays mapped", lane.device
                )
                self._pool.keep()


@contextmanager
def _binding(path: Path) -> Iterator[None]:
    """Tell of what the kernel says as the environment's fault, which it is."""
    try:
        yield
    except OSError as error:
        raise DirectoryUnsafe(
            f"{path} cannot be bound: {remedy(error, 'choose another --address')}"
        ) from error


def _lives(record: Session) -> bool:
    """Tell whether the process of a session is there, or is of another namespace of processes."""
    if record.hello is None or not record.hello.pid:
        return True
    try:
        state = Path(f"/proc/{record.hello.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
