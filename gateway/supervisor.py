"""The supervisor's loop: signals, exits and messages in, the fleet's decisions out.

Everything that happens becomes an entry in one queue; one loop asks `fleet.py` what to do about it and does it. Nothing
is decided in a callback, so that no two decisions overlap.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from gateway import fleet as fleets
from gateway.admin.accumulator import Accumulator
from gateway.admin.app import admin_app, admin_server
from gateway.admin.view import SlotView, View
from gateway.machine import Usage, usage
from gateway.urls import redacted
from gateway.worker_process import WorkerProcess, spawn
from shared.channel import Drain, Failed, Ready, Reload, Status, ToSupervisor
from shared.config import WorkerConfig
from shared.core.errors import ConfigError

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Sequence

    from gateway.backing import Backing
    from gateway.listeners import Listeners
    from shared.config import Settings

    Event = Callable[[float], list[fleets.Action]]

log = logging.getLogger("gateway.supervisor")

# Often enough for a silent worker and for a restart that is due; a tick costs microseconds.
_TICK_S: Final = 0.2
# Reaping ends at once when the store answers; when it does not, the lease does it for us.
_LAST_REAP_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Means:
    """What the supervisor works with, opened by `serve.py` before it and closed after it."""

    listeners: Listeners
    admin_socket: socket.socket
    backing: Backing
    redis_url: str
    public_url: str
    version: str
    worker_command: Sequence[str]
    reread: Callable[[], Settings]
    new_instance: Callable[[], str]
    on_ready: Callable[[], None]
    watch_logprobs: Callable[[Settings, dict[str, bool | None]], Awaitable[None]]


class Supervisor:
    """`await run()` returns the exit code."""

    def __init__(self, settings: Settings, means: Means) -> None:
        self.settings = settings
        self.logprobs_scale: dict[str, bool | None] = dict.fromkeys(settings.upstreams)
        self._means = means
        self._announced = asyncio.Event()
        self._fleet = fleets.Fleet(
            settings.workers,
            drain_timeout_s=settings.drain_timeout_s,
            roll_deadline_s=roll_deadline_s(settings),
        )
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._processes: dict[int, WorkerProcess] = {}
        self._accumulator = Accumulator()
        self._reaping: set[asyncio.Task[None]] = set()
        self._halt: fleets.Halt | None = None
        self._released = False
        self._started_at_s = time.time()
        self._loop_lag_s = 0.0
        self._admin = admin_server(admin_app(self, settings.admin_key))
        self._acts: dict[type, Callable[..., None]] = {
            fleets.SendDrain: self._send_drain,
            fleets.Abort: lambda action: self._signal(action.serial, signal.SIGABRT),
            fleets.Kill: lambda action: self._signal(action.serial, signal.SIGKILL),
            fleets.Steer: lambda action: self._means.listeners.steer(action.slots),
            fleets.Announce: self._announce,
            fleets.Halt: self._stop,
            fleets.Note: _note,
        }

    # -- the loop -----------------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Until the fleet halts. Every worker has ended by then, and the dead ones' samples are given up."""
        self._install_signals()
        async with asyncio.TaskGroup() as group:
            background = [
                group.create_task(self._tick()),
                group.create_task(_guarded(self._means.backing.watch())),
                group.create_task(_guarded(self._watch_logprobs())),
            ]
            serving = group.create_task(self._admin.run_on(self._means.admin_socket))
            halt = await self._obey()
            await self._finish_reaping()
            self._admin.stop()
            await serving
            for task in background:
                task.cancel()
        self._log_farewell(halt)
        return halt.code

    async def _obey(self) -> fleets.Halt:
        self._events.put_nowait(self._fleet.start)
        while self._halt is None:
            event = await self._events.get()
            for action in event(time.monotonic()):
                await self._act(action)
        return self._halt

    async def _act(self, action: fleets.Action) -> None:
        if isinstance(action, fleets.Spawn):
            await self._spawn(action)
        else:
            self._acts[type(action)](action)

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self._loop_lag_s = max(loop.time() - due_s, 0.0)
            self._account()
            self._release_when_all_is_read()
            self._events.put_nowait(self._fleet.tick)

    # -- what happens -------------------------------------------------------------------------------------------

    def _install_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._events.put_nowait, self._terminate)
        loop.add_signal_handler(signal.SIGHUP, self._events.put_nowait, self._hang_up)
        loop.add_signal_handler(signal.SIGUSR1, self._events.put_nowait, self._log_status)

    def on_message(self, serial: int, message: ToSupervisor) -> None:
        if isinstance(message, Status):
            self._accumulator.update(serial, message.counters)
            self._events.put_nowait(partial(self._fleet.heard, serial))
        elif isinstance(message, Ready):
            self._events.put_nowait(partial(self._fleet.ready, serial))
        elif isinstance(message, Failed):
            self._events.put_nowait(partial(self._fleet.failed, serial, message.message))

    def on_exit(self, serial: int, code: int) -> None:
        self._events.put_nowait(partial(self._bury, serial, code))

    def _bury(self, serial: int, code: int, now: float) -> list[fleets.Action]:
        process = self._processes.pop(serial)
        level = logging.INFO if self._fleet.halting or code == 0 else logging.WARNING
        log.log(level, "a worker has ended", extra={"slot": process.config.slot, "pid": process.pid, "code": code})
        self._accumulator.forget(serial)
        task = asyncio.get_running_loop().create_task(self._reap(process.config))
        self._reaping.add(task)
        task.add_done_callback(self._reaping.discard)
        return self._fleet.exited(serial, now)

    def _hang_up(self, now: float) -> list[fleets.Action]:
        try:
            self._take_settings()
        except ConfigError as error:
            log.error("the configuration is wrong now; nothing changes", extra={"reason": str(error)})
            return []
        return self._fleet.roll(now)

    def _take_settings(self) -> None:
        # The sockets and the number of slots are what they are; everything else goes to the new workers.
        new = self._means.reread()
        fixed = {name: getattr(self.settings, name) for name in _FIXED_AT_START}
        self.settings = msgspec.structs.replace(new, **fixed)
        for process in self._processes.values():  # at once, since a roll takes as long as its longest sample
            process.send(Reload(self.settings))
        self._fleet.drain_timeout_s = self.settings.drain_timeout_s
        self._fleet.roll_deadline_s = roll_deadline_s(self.settings)

    # -- what is done about it ----------------------------------------------------------------------------------

    async def _spawn(self, action: fleets.Spawn) -> None:
        config = self._worker_config(action.slot)
        listening = self._means.listeners.sockets[action.slot]
        try:
            process = await spawn(self._means.worker_command, action.serial, config, listening, self)
        except OSError as error:
            log.error("a worker cannot be started", extra={"slot": action.slot, "reason": str(error)})
            self._events.put_nowait(partial(self._fleet.exited, action.serial))
            return
        self._processes[action.serial] = process
        log.info("a worker is starting", extra={"slot": action.slot, "pid": process.pid})

    def _worker_config(self, slot: int) -> WorkerConfig:
        addresses = self.settings.source_ips
        return WorkerConfig(
            settings=self.settings,
            slot=slot,
            instance=self._means.new_instance(),
            source_ip=addresses[slot % len(addresses)] if addresses else None,
            redis_url=self._means.redis_url,
        )

    def _send_drain(self, action: fleets.SendDrain) -> None:
        if process := self._processes.get(action.serial):
            process.send(Drain(action.deadline_s, action.replaced))

    def _release_when_all_is_read(self) -> None:
        """The embedded Redis ends with us: drained workers answer polls until the last result has been fetched."""
        if self._released or not self._fleet.halting or self.settings.redis_url is not None:
            return
        statuses = [process.status for process in self._processes.values()]
        drained = all(status and status.draining and not status.in_flight for status in statuses)
        if drained and unread_results(self._accumulator) == 0:
            self._released = True
            for process in self._processes.values():
                process.send(Drain(0.0))

    def _signal(self, serial: int, number: signal.Signals) -> None:
        if process := self._processes.get(serial):
            process.kill(number)

    def _announce(self, action: fleets.Announce) -> None:
        self._means.on_ready()
        self._announced.set()

    async def _watch_logprobs(self) -> None:
        await self._announced.wait()
        await self._means.watch_logprobs(self.settings, self.logprobs_scale)

    def _stop(self, halt: fleets.Halt) -> None:
        self._halt = halt

    async def _reap(self, config: WorkerConfig) -> None:
        count = await self._means.backing.reap(config.instance)
        self._accumulator.add("orphaned", count)
        if count:
            log.warning("samples of a dead worker are orphaned", extra={"slot": config.slot, "samples": count})

    async def _finish_reaping(self) -> None:
        if self._reaping:
            await asyncio.wait(self._reaping, timeout=_LAST_REAP_S)
        for task in self._reaping:
            task.cancel()

    # -- what operators see -------------------------------------------------------------------------------------

    def view(self) -> View:
        return View(
            url=self._means.public_url,
            version=self._means.version,
            started_at_s=self._started_at_s,
            stopping=self._fleet.halting,
            slots=tuple(self._slot_view(slot) for slot in self._fleet.slots),
            redis_url=redacted(self._means.redis_url),
            redis_embedded=self.settings.redis_url is None,
            redis=self._means.backing.info,
            totals=dict(self._accumulator.totals),
            loop_lag_ms=self._loop_lag_s * 1000,
            logprobs_scale=dict(self.logprobs_scale),
        )

    def _slot_view(self, slot: fleets.Slot) -> SlotView:
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

    def restart_slot(self, slot: int) -> bool:
        if not 0 <= slot < len(self._fleet.slots):
            return False
        self._events.put_nowait(partial(self._fleet.restart, slot))
        return True

    def reload(self) -> None:
        self._take_settings()
        self._events.put_nowait(self._fleet.roll)

    def _account(self) -> None:
        for serial, process in self._processes.items():
            self._accumulator.update(serial, {"cpu_seconds": usage(process.pid).cpu_seconds})

    def _terminate(self, now: float) -> list[fleets.Action]:
        if self._fleet.halting:
            log.warning("a second signal: the workers are killed")
        else:
            log.info("draining; a second signal stops at once", extra={"at_most_s": self.settings.drain_timeout_s})
        return self._fleet.terminate(now)

    def _log_status(self, now: float) -> list[fleets.Action]:
        for slot in self.view().slots:
            in_flight = slot.status.in_flight if slot.status else 0
            fields = {"slot": slot.slot, "state": slot.state, "pid": slot.pid, "in_flight": in_flight}
            log.warning("status of a worker", extra={**fields, "restarts": slot.restarts})
        return []

    def _log_farewell(self, halt: fleets.Halt) -> None:
        if halt.reason:
            log.error("the gateway stops", extra={"reason": halt.reason, "code": halt.code})
            return
        unread = unread_results(self._accumulator)
        if self.settings.redis_url is None and unread:
            log.warning("results that nobody fetched end with the embedded Redis", extra={"results": unread})
        log.info("the gateway has stopped")


# Bound, opened or counted once; a roll cannot change them.
_FIXED_AT_START: Final = (
    "host",
    "port",
    "workers",
    "source_ips",
    "backlog",
    "redis_url",
    "redis_memory_bytes",
    "key_prefix",
    "admin_host",
    "admin_port",
    "admin_key",
    "run_dir",
)


async def _guarded(work: Awaitable[None]) -> None:
    """A task that only informs must not end the gateway when it fails."""
    try:
        await work
    except Exception:
        log.exception("a background task failed; the gateway goes on without it")


def unread_results(accumulator: Accumulator) -> int:
    """Results and errors that were never handed over, as far as the workers have told."""
    count = accumulator.count
    gone = count("delivered") + count("expired_undelivered")
    return max(count("completed") + count("failed") - gone, 0)


def roll_deadline_s(settings: Settings) -> float:
    """Longer than any sample can run: a roll waits for all of them."""
    return settings.upstream_wait_s + settings.read_timeout_s * (1 + settings.max_reexecutions)


def _note(note: fleets.Note) -> None:
    log.warning(note.message, extra={"slot": note.slot, "detail": note.detail} if note.detail else {"slot": note.slot})


def new_instance() -> str:
    """16 characters, new for every process: the owner of samples in the store."""
    return os.urandom(8).hex()
