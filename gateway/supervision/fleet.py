"""Decide what the supervisor does about its workers, without doing it: (event, now) -> actions.

A slot is a numbered, lasting place: a listening socket and a source IP. One process at a time works in it (`current`).
While a roll replaces that process there is also a `successor`, which is not ready yet, and there may be `retiring`
processes, which finish what they run. Each process has a serial number, since a slot's old process may outlive its
replacement.

    spawn -> STARTING -- ready --> READY -- drain --> DRAINING -- exit --> gone
                 |                   |
                 |                   +-- exit, or silent for hung_after_s --> spawned again, with back-off
                 +-- exit before it was ever ready, START_ATTEMPTS times, while no worker is up --> the fleet halts

Beside the slots there may be a spare: a process that has imported everything and waits for a slot. A slot that needs a
process takes the spare if it can, which saves the time of the imports.

    spawn -> IMPORTING -- warm --> WARM -- a slot needs a process --> STARTING, in that slot
                 |                   |
                 +-------------------+-- exit, or silent --> spawned again, with back-off of its own

The spare is spawned only while every slot has what it needs, so that its imports compete with no start and no
recovery. Its death affects no slot: it counts as no restart, ends no roll and halts nothing.

Every event returns the actions that the supervisor must carry out, in that order. Call `tick` at least once a second:
it notices silent workers and deadlines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gateway.supervision.fleet_model import (
    Abort,
    Announce,
    Halt,
    Kill,
    Note,
    Pace,
    Phase,
    Process,
    Promote,
    SendDrain,
    Slot,
    Spawn,
    SpawnSpare,
    Steer,
)

if TYPE_CHECKING:
    from gateway.supervision.fleet_model import Action

# The first restart is immediate: most crashes are the fault of one request, and B11 wants the slot back within 2 s.
_FIRST_DELAY_S: Final = 0.5
_LONGEST_DELAY_S: Final = 30.0
# A process that lived this long did not die because of its start: its death counts as the first one in a row.
_HEALTHY_AFTER_S: Final = 60.0
# A hung worker gets SIGABRT first, so that faulthandler prints its stack. One stopped in the kernel needs SIGKILL.
ABORT_GRACE_S: Final = 1.0
# Imports take less than a second, and longer where many workers start at once from a cold disk.
START_TIMEOUT_S: Final = 60.0
# A spare imports at low priority. On a machine that is always busy it may get a hundredth of a core.
IMPORT_TIMEOUT_S: Final = 300.0
# About 3.5 s of back-off: enough for a cause that passes by itself, and short for an operator who waits.
START_ATTEMPTS: Final = 5
# If the supervisor itself was stopped or starved for this long, it cannot call its workers silent.
_OWN_STALL_S: Final = 2.0

_HOLDING_NOTHING: Final = frozenset({Phase.STARTING, Phase.IMPORTING, Phase.WARM})


def restart_delay_s(deaths: int) -> float:
    """Return the delay before the next restart: 0, 0.5, 1, 2 ... 30 s after the first, second ... death in a row."""
    if deaths <= 1:
        return 0.0
    return min(_FIRST_DELAY_S * float(2 ** min(deaths - 2, 16)), _LONGEST_DELAY_S)


def _kill(process: Process) -> Kill:
    process.phase, process.kill_at = Phase.KILLED, None
    return Kill(process.serial)


class Fleet:
    """Keep all slots and processes, and decide about them.

    `roll_deadline_s` is how long a process that a roll replaced may finish what it runs.
    """

    def __init__(
        self, slots: int, pace: Pace, *, drain_timeout_s: float, roll_deadline_s: float, warm_spare: bool
    ) -> None:
        self._pace = pace
        self.slots = [Slot(number) for number in range(slots)]
        self.drain_timeout_s = drain_timeout_s
        self.roll_deadline_s = roll_deadline_s
        self.warm_spare = warm_spare
        self.spare: Process | None = None
        self._spare_deaths = 0  # in a row
        self._spare_at = 0.0
        self._by_serial: dict[int, Process] = {}
        self._next_serial = 1
        self._announced = False
        self._halting: Halt | None = None
        self._to_roll: list[int] = []
        self._steered: tuple[int, ...] | None = None
        self._ticked_at: float | None = None

    # -- events -------------------------------------------------------------------------------------------------

    def start(self, now: float) -> list[Action]:
        return [self._fill(slot, now) for slot in self.slots]

    def warm(self, serial: int, now: float) -> list[Action]:
        """Note that the spare has imported everything. It reports this every second."""
        if (process := self._by_serial.get(serial)) and process.phase is Phase.IMPORTING:
            process.phase, process.ready_at = Phase.WARM, now
        return self.heard(serial, now)

    def ready(self, serial: int, now: float) -> list[Action]:
        process = self._by_serial.get(serial)
        if process is None or process.slot is None or process.phase is not Phase.STARTING:
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
        """Halt before the first start, or log later, that a worker cannot start and would fail again."""
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
        if process.slot is None:
            return self._spare_lost(process, now) + self._halt_when_empty()
        slot = self.slots[process.slot]
        actions: list[Action] = []
        if slot.current is process:
            actions = self._lost(slot, process, now)
        elif slot.successor is process:
            actions = self._roll_failed(slot, process, now)
        slot.retiring.pop(serial, None)
        return actions + self._steer() + self._roll_next(now) + self._halt_when_empty()

    def tick(self, now: float) -> list[Action]:
        """Act on deadlines, silent processes and restarts that are due."""
        self._forgive_own_stall(now)
        due = [slot for slot in self.slots if slot.spawn_at is not None and slot.spawn_at <= now]
        actions = [self._fill(slot, now) for slot in due]
        for process in self._processes():
            actions += self._overdue(process, now)
        return actions + self._tend_spare(now) + self._halt_when_empty()

    def terminate(self, now: float) -> list[Action]:
        """Drain all workers. The second time, stop at once."""
        if self._halting is None:
            return self._halt(Halt(0), now)
        return self._kill_all()

    def roll(self, now: float) -> list[Action]:
        """Replace every worker, one slot at a time. Another call starts over."""
        self._to_roll = [slot.number for slot in self.slots]
        return self._roll_next(now)

    def restart(self, number: int, now: float) -> list[Action]:
        """Replace the worker of one slot, as a roll does."""
        if number not in self._to_roll:
            self._to_roll.append(number)
        return self._roll_next(now)

    # -- decisions ----------------------------------------------------------------------------------------------

    def _fill(self, slot: Slot, now: float) -> Action:
        slot.spawn_at = None
        slot.current, action = self._process_for(slot, now)
        return action

    def _process_for(self, slot: Slot, now: float) -> tuple[Process, Action]:
        """Return the spare if it is warm, otherwise a new process, and the action that gives it the slot."""
        spare = self.spare
        if spare is None or spare.phase is not Phase.WARM:
            process = self._new_process(slot.number, now, Phase.STARTING)
            return process, Spawn(slot.number, process.serial)
        self.spare, self._spare_deaths = None, 0
        spare.promote(slot.number, now)
        return spare, Promote(slot.number, spare.serial)

    def _new_process(self, slot: int | None, now: float, phase: Phase) -> Process:
        process = Process(self._next_serial, slot, now, phase)
        self._by_serial[process.serial] = process
        self._next_serial += 1
        return process

    def _succeed(self, slot: Slot, process: Process, now: float) -> list[Action]:
        old, slot.current, slot.successor = slot.current, process, None
        slot.restarts += 1
        if old is None:
            return []
        slot.retiring[old.serial] = old
        old.phase, old.kill_at = Phase.DRAINING, now + self.roll_deadline_s + self._pace.drain_grace_s
        return [SendDrain(old.serial, self.roll_deadline_s, replaced=True)]

    def _lost(self, slot: Slot, process: Process, now: float) -> list[Action]:
        slot.current = None
        if self._halting is not None:
            return []
        if slot.successor is not None:  # a roll was under way: the new process takes over
            slot.current, slot.successor = slot.successor, None
            return []
        if process.unproven:
            return [self._fill(slot, now)]
        healthy = process.ready_at is not None and now - process.ready_at >= _HEALTHY_AFTER_S
        slot.deaths = 1 if healthy else slot.deaths + 1
        slot.restarts += 1
        if process.ready_at is None and not self._announced and slot.deaths >= START_ATTEMPTS:
            return self._halt(Halt(4, f"worker {slot.number} died {slot.deaths} times at start"), now)
        return self._respawn(slot, now)

    def _respawn(self, slot: Slot, now: float) -> list[Action]:
        delay_s = restart_delay_s(slot.deaths)
        if delay_s == 0:
            return [self._fill(slot, now)]
        slot.spawn_at = now + delay_s
        return [Note("a worker keeps dying; it restarts later", slot.number, f"in {delay_s:g} s")]

    def _roll_failed(self, slot: Slot, process: Process, now: float) -> list[Action]:
        slot.successor = None
        if self._halting is not None:
            return []
        if process.unproven:
            slot.successor, action = self._process_for(slot, now)
            return [action]
        self._to_roll.clear()
        return [Note("a new worker died before it was ready; the roll stops and the old workers go on", slot.number)]

    def _roll_next(self, now: float) -> list[Action]:
        if self._halting is not None or any(slot.successor for slot in self.slots):
            return []
        while self._to_roll:
            slot = self.slots[self._to_roll[0]]
            if slot.current is not None and slot.current.phase is Phase.STARTING:
                return []  # perhaps spawned with the older settings: replace it once it is ready
            self._to_roll.pop(0)
            if slot.serves:
                slot.successor, action = self._process_for(slot, now)
                return [action]
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
        if process.kill_at is not None and now >= process.kill_at:
            return [_kill(process)]
        limits_s = {Phase.STARTING: START_TIMEOUT_S, Phase.IMPORTING: IMPORT_TIMEOUT_S}
        limit_s = limits_s.get(process.phase, self._pace.hung_after_s)
        silent_s = now - process.heard_at
        if process.phase is Phase.KILLED or silent_s < limit_s:
            return []
        process.phase, process.kill_at = Phase.KILLED, now + ABORT_GRACE_S
        note = Note("a worker hangs and is killed", process.slot, f"silent for {silent_s:.1f} s")
        return [note, *self._steer(), Abort(process.serial)]

    def _forgive_own_stall(self, now: float) -> None:
        stall_s = 0.0 if self._ticked_at is None else now - self._ticked_at
        self._ticked_at = now
        if stall_s > _OWN_STALL_S:
            for process in self._by_serial.values():
                process.heard_at = max(process.heard_at, now - 1.0)

    # -- the spare ----------------------------------------------------------------------------------------------

    def _tend_spare(self, now: float) -> list[Action]:
        if self.spare is not None:
            return [] if self.warm_spare or self.spare.phase is Phase.KILLED else [_kill(self.spare)]
        busy = self._to_roll or any(slot.is_starting for slot in self.slots)
        if not self.warm_spare or not self._announced or self._halting is not None or busy or now < self._spare_at:
            return []
        self.spare = self._new_process(None, now, Phase.IMPORTING)
        return [SpawnSpare(self.spare.serial)]

    def _spare_lost(self, process: Process, now: float) -> list[Action]:
        healthy = process.ready_at is not None and now - process.ready_at >= _HEALTHY_AFTER_S
        self.spare = None
        self._spare_deaths = 1 if healthy else self._spare_deaths + 1
        self._spare_at = now + restart_delay_s(self._spare_deaths)
        return []

    # -- the end ------------------------------------------------------------------------------------------------

    def _halt(self, halt: Halt, now: float) -> list[Action]:
        self._halting = halt
        self._to_roll.clear()
        for slot in self.slots:
            slot.spawn_at = None
        if halt.code != 0:
            return [*self._kill_all(), *self._halt_when_empty()]
        return [*self._drain_all(now), *self._halt_when_empty()]

    def _drain_all(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for process in self._processes():
            if process.phase in _HOLDING_NOTHING:
                actions.append(_kill(process))
            elif process.phase is not Phase.KILLED:
                process.phase, process.kill_at = Phase.DRAINING, now + self.drain_timeout_s + self._pace.drain_grace_s
                actions.append(SendDrain(process.serial, self.drain_timeout_s))
        return actions

    def _processes(self) -> list[Process]:
        in_slots = [process for slot in self.slots for process in slot.processes()]
        return in_slots if self.spare is None else [*in_slots, self.spare]

    def _kill_all(self) -> list[Action]:
        return [_kill(process) for process in self._by_serial.values()]

    def _halt_when_empty(self) -> list[Action]:
        return [self._halting] if self._halting is not None and not self._by_serial else []

    @property
    def halting(self) -> bool:
        return self._halting is not None
