"""The values of `fleet.py`: slots, their processes, and the actions that the supervisor carries out."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final


@dataclass(frozen=True, slots=True)
class Pace:
    """Set how patient the supervisor is, in seconds; tests hand in shorter times.

    `hung_after_s`: a worker reports every second. Eight missed reports are far more than garbage collection or a busy
    machine explain, and far less than the lease (30 s) after which other hosts would give its samples up.
    `drain_grace_s`: at its own deadline a worker orphans and announces what is left, sends the last replies and closes
    its connections, and allows itself 5 s for each of these.
    """

    hung_after_s: float = 8.0
    drain_grace_s: float = 20.0


USUAL_PACE: Final = Pace()


class Phase(Enum):
    IMPORTING = "importing"
    WARM = "warm"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    KILLED = "killed"


@dataclass(slots=True)
class Process:
    """A worker process.

    `slot` is None for the spare, `promoted` is true for a former spare, `ready_at` is when it became ready, or warm.
    """

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
        """True if it was the spare and never became ready: it may have been dead already when it got the slot."""
        return self.promoted and self.ready_at is None


@dataclass(slots=True)
class Slot:
    number: int
    current: Process | None = None
    successor: Process | None = None
    retiring: dict[int, Process] = field(default_factory=dict)
    spawn_at: float | None = None
    deaths: int = 0  # in a row
    restarts: int = 0  # total, including rolls

    @property
    def state(self) -> str:
        """The state as `/status` shows it."""
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
    """Ask the worker to drain. `replaced`: another process serves the slot already."""

    serial: int
    deadline_s: float
    replaced: bool = False


@dataclass(frozen=True, slots=True)
class Abort:
    """Send SIGABRT to a worker that hangs, so that it prints its stack."""

    serial: int


@dataclass(frozen=True, slots=True)
class Kill:
    """Send SIGKILL."""

    serial: int


@dataclass(frozen=True, slots=True)
class Steer:
    """Send new connections to these slots."""

    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Announce:
    """Report that every slot has a ready worker, for the first time."""


@dataclass(frozen=True, slots=True)
class Halt:
    """End the supervisor: no process is left. `reason` explains an exit `code` that is not 0."""

    code: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Note:
    """Log a message. `slot` is None for the spare."""

    message: str
    slot: int | None
    detail: str = ""


Action = Spawn | SpawnSpare | Promote | SendDrain | Abort | Kill | Steer | Announce | Halt | Note
