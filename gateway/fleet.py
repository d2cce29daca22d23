"""What the supervisor does about its workers, decided without doing it: (event, now) -> actions.

A slot is a numbered, lasting place: a listening socket and a source IP. In it works one process at a time (`current`);
while a roll replaces it there is also a `successor` that is not ready yet, and there may be `retiring` ones that end
what they run. Processes are told apart by a serial number, since a slot's old process may outlive its replacement.

    spawn -> STARTING -- ready --> READY -- drain --> DRAINING -- exit --> gone
                 |                   |
                 |                   +-- exit, or silent for HUNG_AFTER_S --> spawned again, with back-off
                 +-- exit before it was ever ready, START_ATTEMPTS times, while no worker is up --> the fleet halts

Every event answers with the list of actions that the supervisor must carry out, in that order. `tick` must be called at
least once a second: it is what notices silence and deadlines.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final

# The first restart is immediate: a crash is usually one request's fault, and B11 wants the slot back within 2 s.
_FIRST_DELAY_S: Final = 0.5
_LONGEST_DELAY_S: Final = 30.0
# A process that lived this long did not die of its start: the next death counts as a first one again.
_HEALTHY_AFTER_S: Final = 60.0
# A worker reports every second. Eight missed reports are far more than garbage collection or a busy machine explain,
# and far less than the lease (30 s) after which other hosts would give its samples up.
HUNG_AFTER_S: Final = 8.0
# SIGABRT comes first, for the stack that faulthandler prints; a process stopped in the kernel needs SIGKILL.
ABORT_GRACE_S: Final = 1.0
# Importing takes below a second; a machine that starts many workers at once on a cold disk takes longer.
START_TIMEOUT_S: Final = 60.0
# About 3.5 s of back-off: enough for a cause that passes by itself, short enough for whoever waits for the prompt.
START_ATTEMPTS: Final = 5
# At its own deadline a worker orphans and announces what is left, hands over the last replies and closes its
# connections, for each of which it allows itself 5 s.
DRAIN_GRACE_S: Final = 20.0
# A supervisor that was itself stopped or starved cannot call its workers silent.
_OWN_STALL_S: Final = 2.0


class Phase(Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    KILLED = "killed"


# -- actions ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spawn:
    slot: int
    serial: int


@dataclass(frozen=True, slots=True)
class SendDrain:
    """`replaced`: another process serves the slot by now."""

    serial: int
    deadline_s: float
    replaced: bool = False


@dataclass(frozen=True, slots=True)
class Abort:
    """SIGABRT: the worker is hung, and its stack is wanted."""

    serial: int


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL."""

    serial: int


@dataclass(frozen=True, slots=True)
class Steer:
    """New connections go to these slots."""

    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Announce:
    """Every slot has a ready worker for the first time."""


@dataclass(frozen=True, slots=True)
class Halt:
    """No process is left. `code` is the supervisor's exit code, `reason` why when it is not 0."""

    code: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Note:
    """Something for the log."""

    message: str
    slot: int
    detail: str = ""


Action = Spawn | SendDrain | Abort | Kill | Steer | Announce | Halt | Note


# -- state --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Process:
    serial: int
    slot: int
    heard_at: float
    phase: Phase = Phase.STARTING
    ready_at: float | None = None
    kill_at: float | None = None


@dataclass(slots=True)
class Slot:
    number: int
    current: Process | None = None
    successor: Process | None = None
    retiring: dict[int, Process] = field(default_factory=dict)
    spawn_at: float | None = None
    deaths: int = 0  # in a row
    restarts: int = 0  # in all, rolls included

    @property
    def state(self) -> str:
        """One word for `/status`."""
        if self.current is not None:
            return self.current.phase.value
        return "backing off" if self.spawn_at is not None else "draining" if self.retiring else "stopped"

    @property
    def serves(self) -> bool:
        return self.current is not None and self.current.phase is Phase.READY

    def processes(self) -> list[Process]:
        return [*filter(None, (self.current, self.successor)), *self.retiring.values()]


def restart_delay_s(deaths: int) -> float:
    """0, 0.5, 1, 2 ... 30 s, for the first, second ... death in a row."""
    if deaths <= 1:
        return 0.0
    return min(_FIRST_DELAY_S * float(2 ** min(deaths - 2, 16)), _LONGEST_DELAY_S)


class Fleet:
    """`roll_deadline_s`: how long a process that a roll replaced may go on with what it runs."""

    def __init__(self, slots: int, *, drain_timeout_s: float, roll_deadline_s: float) -> None:
        self.slots = [Slot(number) for number in range(slots)]
        self.drain_timeout_s = drain_timeout_s
        self.roll_deadline_s = roll_deadline_s
        self._by_serial: dict[int, Process] = {}
        self._next_serial = 1
        self._announced = False
        self._halting: Halt | None = None
        self._to_roll: list[int] = []
        self._steered: tuple[int, ...] | None = None
        self._ticked_at: float | None = None

    # -- events -------------------------------------------------------------------------------------------------

    def start(self, now: float) -> list[Action]:
        return [self._spawn(slot, now) for slot in self.slots]

    def ready(self, serial: int, now: float) -> list[Action]:
        process = self._by_serial.get(serial)
        if process is None or process.phase is not Phase.STARTING:
            return []
        process.phase, process.ready_at, process.heard_at = Phase.READY, now, now
        slot = self.slots[process.slot]
        actions: list[Action] = []
        if slot.successor is process:
            actions += self._succeed(slot, process, now)
        return actions + self._steer() + self._announce() + self._roll_next(now)

    def heard(self, serial: int, now: float) -> list[Action]:
        if process := self._by_serial.get(serial):
            process.heard_at = now
        return []

    def failed(self, serial: int, message: str, now: float) -> list[Action]:
        """The worker says that it cannot start, and could not the next time."""
        process = self._by_serial.get(serial)
        if process is None:
            return []
        if not self._announced:
            return self._halt(Halt(3, message), now)
        return [Note("a worker cannot start", process.slot, message)]

    def exited(self, serial: int, now: float) -> list[Action]:
        process = self._by_serial.pop(serial, None)
        if process is None:
            return []
        slot = self.slots[process.slot]
        actions: list[Action] = []
        if slot.current is process:
            actions = self._lost(slot, process, now)
        elif slot.successor is process:
            actions = self._roll_failed(slot)
        slot.retiring.pop(serial, None)
        return actions + self._steer() + self._roll_next(now) + self._halt_when_empty()

    def tick(self, now: float) -> list[Action]:
        """Deadlines, silence, and restarts that are due."""
        self._forgive_own_stall(now)
        actions: list[Action] = []
        for slot in self.slots:
            if slot.spawn_at is not None and slot.spawn_at <= now:
                actions.append(self._spawn(slot, now))
            for process in slot.processes():
                actions += self._overdue(process, now)
        return actions + self._halt_when_empty()

    def terminate(self, now: float) -> list[Action]:
        """Drain all; the second time, stop at once."""
        if self._halting is None:
            return self._halt(Halt(0), now)
        return [Kill(process.serial) for process in self._kill_all()]

    def roll(self, now: float) -> list[Action]:
        """Replace every worker, one slot at a time; asking again begins anew."""
        self._to_roll = [slot.number for slot in self.slots]
        return self._roll_next(now)

    def restart(self, number: int, now: float) -> list[Action]:
        """Replace one slot's worker, as a roll would."""
        if number not in self._to_roll:
            self._to_roll.append(number)
        return self._roll_next(now)

    # -- decisions ----------------------------------------------------------------------------------------------

    def _spawn(self, slot: Slot, now: float) -> Spawn:
        slot.current, slot.spawn_at = self._new_process(slot, now), None
        return Spawn(slot.number, slot.current.serial)

    def _new_process(self, slot: Slot, now: float) -> Process:
        process = Process(self._next_serial, slot.number, now)
        self._by_serial[process.serial] = process
        self._next_serial += 1
        return process

    def _succeed(self, slot: Slot, process: Process, now: float) -> list[Action]:
        old, slot.current, slot.successor = slot.current, process, None
        slot.restarts += 1
        if old is None:
            return []
        slot.retiring[old.serial] = old
        old.phase, old.kill_at = Phase.DRAINING, now + self.roll_deadline_s + DRAIN_GRACE_S
        return [SendDrain(old.serial, self.roll_deadline_s, replaced=True)]

    def _lost(self, slot: Slot, process: Process, now: float) -> list[Action]:
        slot.current = None
        if self._halting is not None:
            return []
        if slot.successor is not None:  # a roll was under way: its process takes the place
            slot.current, slot.successor = slot.successor, None
            return []
        healthy = process.ready_at is not None and now - process.ready_at >= _HEALTHY_AFTER_S
        slot.deaths = 1 if healthy else slot.deaths + 1
        slot.restarts += 1
        if process.ready_at is None and not self._announced and slot.deaths >= START_ATTEMPTS:
            return self._halt(Halt(4, f"worker {slot.number} died {slot.deaths} times at start"), now)
        return self._respawn(slot, now)

    def _respawn(self, slot: Slot, now: float) -> list[Action]:
        delay_s = restart_delay_s(slot.deaths)
        if delay_s == 0:
            return [self._spawn(slot, now)]
        slot.spawn_at = now + delay_s
        return [Note("a worker keeps dying; it is restarted later", slot.number, f"in {delay_s:g} s")]

    def _roll_failed(self, slot: Slot) -> list[Action]:
        slot.successor = None
        if self._halting is not None:
            return []
        self._to_roll.clear()
        return [Note("a new worker died before it was ready: the roll is given up, the old ones go on", slot.number)]

    def _roll_next(self, now: float) -> list[Action]:
        if self._halting is not None or any(slot.successor for slot in self.slots):
            return []
        while self._to_roll:
            slot = self.slots[self._to_roll[0]]
            if slot.current is not None and slot.current.phase is Phase.STARTING:
                return []  # it was spawned with the older settings, perhaps: its turn comes once it is ready
            self._to_roll.pop(0)
            if slot.serves:
                slot.successor = self._new_process(slot, now)
                return [Spawn(slot.number, slot.successor.serial)]
        return []

    def _steer(self) -> list[Action]:
        serving = tuple(slot.number for slot in self.slots if slot.serves)
        if serving == self._steered:
            return []
        self._steered = serving
        return [Steer(serving)]

    def _announce(self) -> list[Action]:
        if self._announced or not all(slot.serves for slot in self.slots):
            return []
        self._announced = True
        return [Announce()]

    def _overdue(self, process: Process, now: float) -> list[Action]:
        if process.kill_at is not None:
            if now < process.kill_at:
                return [] if process.phase is Phase.KILLED else self._hung(process, now)
            process.phase, process.kill_at = Phase.KILLED, None
            return [Kill(process.serial)]
        return [] if process.phase is Phase.KILLED else self._hung(process, now)

    def _hung(self, process: Process, now: float) -> list[Action]:
        limit_s = START_TIMEOUT_S if process.phase is Phase.STARTING else HUNG_AFTER_S
        silent_s = now - process.heard_at
        if silent_s < limit_s:
            return []
        process.phase, process.kill_at = Phase.KILLED, now + ABORT_GRACE_S
        note = Note("a worker is hung and is killed", process.slot, f"silent for {silent_s:.1f} s")
        return [note, *self._steer(), Abort(process.serial)]

    def _forgive_own_stall(self, now: float) -> None:
        stall_s = 0.0 if self._ticked_at is None else now - self._ticked_at
        self._ticked_at = now
        if stall_s > _OWN_STALL_S:
            for process in self._by_serial.values():
                process.heard_at = max(process.heard_at, now - 1.0)

    # -- the end ------------------------------------------------------------------------------------------------

    def _halt(self, halt: Halt, now: float) -> list[Action]:
        self._halting = halt
        self._to_roll.clear()
        for slot in self.slots:
            slot.spawn_at = None
        if halt.code != 0:
            return [*(Kill(process.serial) for process in self._kill_all()), *self._halt_when_empty()]
        return [*self._drain_all(now), *self._halt_when_empty()]

    def _drain_all(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for slot in self.slots:
            for process in slot.processes():
                if process.phase is Phase.STARTING:
                    process.phase = Phase.KILLED  # it holds nothing
                    actions.append(Kill(process.serial))
                elif process.phase is not Phase.KILLED:
                    process.phase, process.kill_at = Phase.DRAINING, now + self.drain_timeout_s + DRAIN_GRACE_S
                    actions.append(SendDrain(process.serial, self.drain_timeout_s))
        return actions

    def _kill_all(self) -> list[Process]:
        for process in self._by_serial.values():
            process.phase, process.kill_at = Phase.KILLED, None
        return list(self._by_serial.values())

    def _halt_when_empty(self) -> list[Action]:
        return [self._halting] if self._halting is not None and not self._by_serial else []

    @property
    def halting(self) -> bool:
        return self._halting is not None

    @property
    def announced(self) -> bool:
        return self._announced
