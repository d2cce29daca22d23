"""The life of a sample, as one table.

    (nothing) --BEGIN--> PENDING --SETTLE_READY--> READY --HANDED_OVER--> RETRIEVED --EXPIRE--> GONE
                            +------SETTLE_FAILED-> FAILED
                            +------CANCEL--------> CANCELLED   the client asked
                            +------GO_STALE------> STALE       its session was finished or fell silent
                            +------ORPHAN--------> ORPHANED    its worker died, or it was interrupted too often

A step that is not in the table changes nothing: the first terminal state wins, and a late result of a cancelled or
orphaned sample meets a state that has no row for it. Redis executes this very table, atomically and next to the data:
the source of its scripts is built from `TRANSITIONS` (`shared/store/scripts.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final


class State(Enum):
    """A sample's state. Its value is the first byte of a stored record; GONE means that there is no record."""

    PENDING = "P"
    READY = "R"
    RETRIEVED = "D"
    FAILED = "F"
    CANCELLED = "C"
    STALE = "S"
    ORPHANED = "O"
    GONE = ""


class Event(Enum):
    """A step in the life of a sample."""

    BEGIN = "begin"
    SETTLE_READY = "settle_ready"
    SETTLE_FAILED = "settle_failed"
    CANCEL = "cancel"
    GO_STALE = "go_stale"
    ORPHAN = "orphan"
    HANDED_OVER = "handed_over"
    EXPIRE = "expire"


Transitions = Mapping[tuple[State, Event], State]

TRANSITIONS: Final[Transitions] = {
    (State.GONE, Event.BEGIN): State.PENDING,
    (State.PENDING, Event.SETTLE_READY): State.READY,
    (State.PENDING, Event.SETTLE_FAILED): State.FAILED,
    (State.PENDING, Event.CANCEL): State.CANCELLED,
    (State.PENDING, Event.GO_STALE): State.STALE,
    (State.PENDING, Event.ORPHAN): State.ORPHANED,
    # A wiped store does not know what its workers still run; it takes their results all the same.
    (State.GONE, Event.SETTLE_READY): State.READY,
    (State.GONE, Event.SETTLE_FAILED): State.FAILED,
    (State.GONE, Event.CANCEL): State.CANCELLED,
    (State.GONE, Event.GO_STALE): State.STALE,
    (State.GONE, Event.ORPHAN): State.ORPHANED,
    (State.READY, Event.HANDED_OVER): State.RETRIEVED,
    # PENDING has no EXPIRE: it stays while its owner lives, and the reaper orphans it otherwise.
    (State.READY, Event.EXPIRE): State.GONE,
    (State.RETRIEVED, Event.EXPIRE): State.GONE,
    (State.FAILED, Event.EXPIRE): State.GONE,
    (State.CANCELLED, Event.EXPIRE): State.GONE,
    (State.STALE, Event.EXPIRE): State.GONE,
    (State.ORPHANED, Event.EXPIRE): State.GONE,
}

SETTLED: Final = frozenset({State.READY, State.RETRIEVED, State.FAILED, State.CANCELLED, State.STALE, State.ORPHANED})

SETTLING: Final[dict[State, Event]] = {
    State.READY: Event.SETTLE_READY,
    State.FAILED: Event.SETTLE_FAILED,
    State.CANCELLED: Event.CANCEL,
    State.STALE: Event.GO_STALE,
    State.ORPHANED: Event.ORPHAN,
}


class Answer(Enum):
    """An answer of `retrieve_future`, before it becomes an HTTP reply."""

    TRY_AGAIN = "try_again"
    RESULT = "result"
    FAILURE = "failure"
    RESUBMIT = "resubmit"


ANSWERS: Final[dict[State, Answer]] = {
    State.PENDING: Answer.TRY_AGAIN,
    State.READY: Answer.RESULT,
    State.RETRIEVED: Answer.RESULT,
    State.FAILED: Answer.FAILURE,
    State.CANCELLED: Answer.FAILURE,
    State.STALE: Answer.RESUBMIT,
    State.ORPHANED: Answer.RESUBMIT,
    State.GONE: Answer.RESUBMIT,
}


def after(state: State, event: Event, transitions: Transitions = TRANSITIONS) -> State:
    """Return the state after `event`, or `state` itself if the table has no such step."""
    return transitions.get((state, event), state)


def allows(state: State, event: Event, transitions: Transitions = TRANSITIONS) -> bool:
    """Return whether the table has this step."""
    return (state, event) in transitions
