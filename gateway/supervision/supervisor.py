"""The supervisor's loop: signals, exits and messages go in, the fleet's decisions are carried out.

Everything that happens becomes an entry in one queue. One loop asks `fleet.py` what to do about each entry and does it.
No callback decides anything, so no two decisions overlap.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from gateway.admin.accumulator import Accumulator
from gateway.admin.app import admin_app, admin_server
from gateway.admin.key_ledger import KeyLedger
from gateway.admin.report import undelivered
from gateway.admin.timings import TimingLedger
from gateway.admin.view import SlotView, SpareView, View
from gateway.machine.kernel import Usage, usage
from gateway.settings.resolve import for_running_gateway, need_a_restart, roll_deadline_s
from gateway.settings.urls import redacted
from gateway.supervision import fleet as fleets
from gateway.supervision import fleet_model
from gateway.supervision.logprobs_watch import follow_upstreams, watch_logprobs
from gateway.supervision.worker_process import WorkerProcess, new_instance, spawn
from shared.channel import Drain, Failed, Ready, Reload, Status, ToSupervisor, Warm
from shared.config import WorkerConfig
from shared.core.errors import ConfigError

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from gateway.supervision.backing import Backing
    from gateway.supervision.fleet_model import Process, Slot
    from gateway.supervision.listeners import Listeners
    from shared.config import Settings

    Event = Callable[[float], list[fleet_model.Action]]

log = logging.getLogger("gateway.supervisor")

# Soon enough to notice a silent worker and a restart that is due; a tick costs microseconds.
_TICK_S: Final = 0.2
# Reaping takes no time while the store answers. Otherwise the leases run out and other workers reap.
_LAST_REAP_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class SupervisorParts:
    """Hold what the supervisor works with; `serve.py` opens it before the supervisor starts and closes it after."""

    listeners: Listeners
    admin_socket: socket.socket
    backing: Backing
    redis_url: str
    public_url: str
    version: str
    worker_command: Sequence[str]
    worker_environ: Mapping[str, str]
    reread: Callable[[], Settings]
    on_ready: Callable[[], None]
    pace: fleet_model.Pace


class Supervisor:
    """The parent process of the workers; `run` returns its exit code."""

    def __init__(self, settings: Settings, parts: SupervisorParts) -> None:
        self.settings = settings
        self.logprobs_scale: dict[str, bool | None] = dict.fromkeys(settings.upstreams)
        self._parts = parts
        self._announced = asyncio.Event()
        self._fleet = fleets.Fleet(
            settings.workers,
            parts.pace,
            drain_timeout_s=settings.drain_timeout_s,
            roll_deadline_s=roll_deadline_s(settings),
            warm_spare=settings.warm_spare,
        )
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._processes: dict[int, WorkerProcess] = {}
        self._accumulator = Accumulator()
        self._keys = KeyLedger()
        self._timings = TimingLedger()
        self._reaping: set[asyncio.Task[None]] = set()
        self._halt: fleet_model.Halt | None = None
        self._released = False
        self._started_at_s = time.time()
        self._loop_lag_s = 0.0
        self._admin = admin_server(admin_app(self, settings.admin_key))
        self._acts: dict[type, Callable[..., None]] = {
            fleet_model.Promote: self._promote,
            fleet_model.SendDrain: self._send_drain,
            fleet_model.Abort: lambda action: self._signal(action.serial, signal.SIGABRT),
            fleet_model.Kill: lambda action: self._signal(action.serial, signal.SIGKILL),
            fleet_model.Steer: lambda action: self._parts.listeners.steer(action.slots),
            fleet_model.Announce: self._announce,
            fleet_model.Halt: self._stop,
            fleet_model.Note: _note,
        }

    # -- the loop -----------------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Run until the fleet halts, and return the exit code. By then every worker has ended and its samples too."""
        self._install_signals()
        async with asyncio.TaskGroup() as group:
            background = [
                group.create_task(self._tick()),
                group.create_task(_guarded(self._parts.backing.watch())),
                group.create_task(_guarded(self._watch_logprobs())),
            ]
            serving = group.create_task(self._admin.run_on(self._parts.admin_socket))
            halt = await self._handle_events()
            if self._reaping:
                await asyncio.wait(self._reaping, timeout=_LAST_REAP_S)
            for task in self._reaping:
                task.cancel()
            self._admin.stop()
            await serving
            for task in background:
                task.cancel()
        self._log_farewell(halt)
        return halt.code

    async def _handle_events(self) -> fleet_model.Halt:
        self._events.put_nowait(self._fleet.start)
        while self._halt is None:
            event = await self._events.get()
            for action in event(time.monotonic()):
                await self._act(action)
        return self._halt

    async def _act(self, action: fleet_model.Action) -> None:
        if isinstance(action, fleet_model.Spawn | fleet_model.SpawnSpare):
            await self._spawn(action)
        else:
            self._acts[type(action)](action)

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self._loop_lag_s = max(loop.time() - due_s, 0.0)
            for process in self._workers():
                self._accumulator.update(process.serial, {"cpu_seconds": usage(process.pid).cpu_seconds})
            self._timings.tick(loop.time())
            self._release_when_all_is_fetched()
            self._events.put_nowait(self._fleet.tick)

    # -- events -------------------------------------------------------------------------------------------------

    def _install_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._events.put_nowait, self._terminate)
        loop.add_signal_handler(signal.SIGHUP, self._events.put_nowait, self._hang_up)
        loop.add_signal_handler(signal.SIGUSR1, self._events.put_nowait, self._log_status)

    def on_message(self, serial: int, message: ToSupervisor) -> None:
        if isinstance(message, Status):
            self._accumulator.update(serial, message.counters)
            self._keys.update(serial, message.keys)
            follow_upstreams(self.logprobs_scale, message.upstreams)
            self._timings.update(serial, message)
            self._events.put_nowait(partial(self._fleet.heard, serial))
        elif isinstance(message, Warm):
            self._events.put_nowait(partial(self._fleet.warm, serial))
        elif isinstance(message, Ready):
            self._events.put_nowait(partial(self._fleet.ready, serial))
        elif isinstance(message, Failed):
            self._events.put_nowait(partial(self._fleet.failed, serial, message.message))

    def on_exit(self, serial: int, code: int) -> None:
        self._events.put_nowait(partial(self._bury, serial, code))

    def _bury(self, serial: int, code: int, now: float) -> list[fleet_model.Action]:
        process = self._processes.pop(serial)
        level = logging.INFO if self._fleet.halting or code == 0 else logging.WARNING
        if process.config is not None:
            extra = {"slot": process.config.slot, "pid": process.pid, "code": code}
            log.log(level, "a worker has ended", extra=extra)
        else:
            # The spare holds no samples and is killed whenever it is not needed.
            log.log(level, "the spare has ended", extra={"pid": process.pid, "code": code})
        self._accumulator.forget(serial)
        self._keys.forget(serial)
        self._timings.forget(serial)
        if process.config is not None:
            task = asyncio.get_running_loop().create_task(self._reap(process.config))
            self._reaping.add(task)
            task.add_done_callback(self._reaping.discard)
        return self._fleet.exited(serial, now)

    def _hang_up(self, now: float) -> list[fleet_model.Action]:
        try:
            self._take_settings()
        except ConfigError as error:
            log.error("the configuration is invalid now; nothing changes", extra={"reason": str(error)})
            return []
        return self._fleet.roll(now)

    def _take_settings(self) -> None:
        new = self._parts.reread()
        if changed := need_a_restart(new, self.settings):
            log.warning("some changes of the configuration need a restart", extra={"unchanged": changed})
        self.settings = for_running_gateway(new, self.settings)
        for process in self._workers():  # at once: a roll takes as long as its longest sample
            process.send(Reload(self.settings))
        self._fleet.drain_timeout_s = self.settings.drain_timeout_s
        self._fleet.roll_deadline_s = roll_deadline_s(self.settings)
        self._fleet.warm_spare = self.settings.warm_spare
        log.info("the configuration was read again; the workers are replaced one slot at a time")

    # -- actions ------------------------------------------------------------------------------------------------

    async def _spawn(self, action: fleet_model.Spawn | fleet_model.SpawnSpare) -> None:
        slot = action.slot if isinstance(action, fleet_model.Spawn) else "spare"
        try:
            process = await spawn(self._parts.worker_command, self._parts.worker_environ, action.serial, self)
        except OSError as error:
            log.error("a worker cannot be started", extra={"slot": slot, "reason": str(error)})
            self._events.put_nowait(partial(self._fleet.exited, action.serial))
            return
        self._processes[action.serial] = process
        log.info("a worker is starting", extra={"slot": slot, "pid": process.pid})
        if isinstance(action, fleet_model.Spawn):
            self._give_slot(process, action.slot)
        else:
            process.prepare()

    def _promote(self, action: fleet_model.Promote) -> None:
        # If the spare has ended meanwhile, the fleet is about to hear of it.
        if process := self._processes.get(action.serial):
            log.info("the spare becomes a worker", extra={"slot": action.slot, "pid": process.pid})
            self._give_slot(process, action.slot)

    def _give_slot(self, process: WorkerProcess, slot: int) -> None:
        addresses = self.settings.source_ips
        config = WorkerConfig(
            settings=self.settings,
            slot=slot,
            instance=new_instance(),
            source_ip=addresses[slot % len(addresses)] if addresses else None,
            redis_url=self._parts.redis_url,
        )
        process.start(config, self._parts.listeners.sockets[slot])

    def _workers(self) -> list[WorkerProcess]:
        """Return all processes except the spare."""
        return [process for process in self._processes.values() if process.config is not None]

    def _send_drain(self, action: fleet_model.SendDrain) -> None:
        if process := self._processes.get(action.serial):
            process.send(Drain(action.deadline_s, action.replaced))

    def _release_when_all_is_fetched(self) -> None:
        """End the drained workers once all results have been fetched.

        The embedded Redis ends with the supervisor, so drained workers go on answering polls until then.
        """
        if self._released or not self._fleet.halting or self.settings.redis_url is not None:
            return
        statuses = [process.status for process in self._workers()]
        drained = all(
            status and status.draining and not (status.in_flight or status.passed_in_flight) for status in statuses
        )
        if drained and undelivered(self._accumulator.totals)["results"] == 0:
            self._released = True
            for process in self._workers():
                process.send(Drain(0.0))

    def _signal(self, serial: int, number: signal.Signals) -> None:
        if process := self._processes.get(serial):
            process.kill(number)

    def _announce(self, action: fleet_model.Announce) -> None:
        self._parts.on_ready()
        self._announced.set()

    async def _watch_logprobs(self) -> None:
        await self._announced.wait()
        await watch_logprobs(self.settings, self.logprobs_scale)

    def _stop(self, halt: fleet_model.Halt) -> None:
        self._halt = halt

    async def _reap(self, config: WorkerConfig) -> None:
        count = await self._parts.backing.reap(config.instance)
        self._accumulator.add("orphaned", count)
        if count:
            log.warning("samples of a dead worker are orphaned", extra={"slot": config.slot, "samples": count})

    # -- the admin address --------------------------------------------------------------------------------------

    def view(self) -> View:
        slots = tuple(self._slot_view(slot) for slot in self._fleet.slots)
        names = [key.name for key in self.settings.api_keys or ()]
        return View(
            url=self._parts.public_url,
            version=self._parts.version,
            started_at_s=self._started_at_s,
            stopping=self._fleet.halting,
            slots=slots,
            redis_url=redacted(self._parts.redis_url),
            redis_embedded=self.settings.redis_url is None,
            redis=self._parts.backing.info,
            totals=dict(self._accumulator.totals),
            loop_lag_ms=self._loop_lag_s * 1000,
            logprobs_scale=dict(self.logprobs_scale),
            spare=self._spare_view(self._fleet.spare),
            flag_upstreams=self.settings.upstreams,
            redis_lag_ms=self._parts.backing.lag_ms,
            since_start=self._timings.since_start(),
            last_minute=self._timings.last_minute(),
            keys=self._keys.views(names, [slot.status for slot in slots if slot.status is not None]),
        )

    def _spare_view(self, spare: Process | None) -> SpareView | None:
        process = self._processes.get(spare.serial) if spare is not None else None
        if spare is None or process is None:
            return None
        return SpareView(spare.phase.value, process.pid, usage(process.pid))

    def _slot_view(self, slot: Slot) -> SlotView:
        process = self._processes.get(slot.current.serial) if slot.current is not None else None
        addresses = self.settings.source_ips
        return SlotView(
            slot=slot.number,
            state=slot.state,
            source_ip=addresses[slot.number % len(addresses)] if addresses else None,
            restarts=slot.restarts,
            pid=process.pid if process else None,
            started_at_s=process.started_at_s if process else None,
            usage=usage(process.pid) if process else Usage(),
            status=process.status if process else None,
            draining=len(slot.retiring),
        )

    async def upstream_list(self, wanted: Sequence[str] | None) -> Sequence[str]:
        return await self._parts.backing.upstream_list(wanted)

    def restart_slot(self, slot: int) -> bool:
        if not 0 <= slot < len(self._fleet.slots):
            return False
        self._events.put_nowait(partial(self._fleet.restart, slot))
        return True

    def reload(self) -> None:
        self._take_settings()
        self._events.put_nowait(self._fleet.roll)

    def _terminate(self, now: float) -> list[fleet_model.Action]:
        if self._fleet.halting:
            log.warning("second signal; the workers are killed")
        else:
            log.info("draining; a second signal stops at once", extra={"at_most_s": self.settings.drain_timeout_s})
        return self._fleet.terminate(now)

    def _log_status(self, now: float) -> list[fleet_model.Action]:
        for slot in self.view().slots:
            in_flight = slot.status.in_flight if slot.status else 0
            fields = {"slot": slot.slot, "state": slot.state, "pid": slot.pid, "in_flight": in_flight}
            log.warning("status of a worker", extra={**fields, "restarts": slot.restarts})
        return []

    def _log_farewell(self, halt: fleet_model.Halt) -> None:
        if halt.reason:
            log.error("the gateway stops", extra={"reason": halt.reason, "code": halt.code})
            return
        unread = undelivered(self._accumulator.totals)["results"]
        if self.settings.redis_url is None and unread:
            log.warning("results that no client fetched are lost with the embedded Redis", extra={"results": unread})
        log.info("the gateway has stopped")


async def _guarded(work: Awaitable[None]) -> None:
    """Log a failure of a task that only collects information; it must not end the gateway."""
    try:
        await work
    except Exception:
        log.exception("a background task failed; the gateway goes on without it")


def _note(note: fleet_model.Note) -> None:
    log.warning(note.message, extra={"slot": note.slot, "detail": note.detail} if note.detail else {"slot": note.slot})
