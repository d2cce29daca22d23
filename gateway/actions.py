"""What `fleet.py` tells the supervisor to do."""

from __future__ import annotations

from dataclasses import dataclass


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
