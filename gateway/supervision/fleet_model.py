"""What `fleet.py` remembers: slots, and the processes in and beside them.

What `fleet.py` tells the supervisor to do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Phase(Enum):
    IMPORTING = "importing"
    WARM = "warm"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    KILLED = "killed"


@dataclass(slots=True)
class Process:
    """`slot`: None for the spare. `promoted`: it was the spare. `ready_at`: since when it serves, or is warm."""

    serial: int
    slot: int | None
    heard_at: float
    phase: Phase = Phase.STARTING
    ready_at: float | None = None
    kill_at: float | None = None
    promoted: bool = False

    def promote(self, slot: int, now: float) -> None:
        self.slot, self.phase, self.heard_at, self.ready_at, self.promoted = slot, Phase.STARTING, now, None, True

    @property
    def unproven(self) -> bool:
        """It was dead, or as good as, when it was given the slot: the slot has not had its try yet."""
        return self.promoted and self.ready_at is None


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

    @property
    def is_starting(self) -> bool:
        return self.successor is not None or (self.current is not None and self.current.phase is Phase.STARTING)

    def processes(self) -> list[Process]:
        return [*filter(None, (self.current, self.successor)), *self.retiring.values()]


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start a process and give it the slot."""

    slot: int
    serial: int


@dataclass(frozen=True, slots=True)
class SpawnSpare:
    """Start a process that waits for a slot."""

    serial: int


@dataclass(frozen=True, slots=True)
class Promote:
    """Give the slot to the spare."""

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
    """Something for the log. `slot`: None for the spare."""

    message: str
    slot: int | None
    detail: str = ""


Action = Spawn | SpawnSpare | Promote | SendDrain | Abort | Kill | Steer | Announce | Halt | Note
