"""Decide what the client does after each reply, as the public SDK does. Pure tables and functions.

A reply is reduced to a `ReplyEvent`, the event to a row of the endpoint's table, and the row to a `Reaction`. The
client's coroutines carry the reactions out and decide nothing themselves.

The SDK's two-hour stuck detection and one-hour billing window are left out: no bench run lasts that long.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

# After this long the SDK gives up on a submission and starts over under a new seq_id.
E5_WINDOW_S: Final = 300.0
_BACKOFF_CAP_S: Final = 30.0
_OUTER_CAP_S: Final = 10.0
BILLING_PAUSE_S: Final = 5.0
SESSION_POLL_RETRY_S: Final = 1.0
# A retrieve or a session poll is retried after this many 400s in a row; one more is fatal.
_TOLERATED_400S: Final = 3
_SETUP_RETRIES: Final = 10


class ReplyEvent(NamedTuple):
    """The outcome of a request. `status` is 0 if there was no reply: the connection failed or the time ran out.

    `bare` marks a 400 without a positive Content-Length, which the SDK attributes to a proxy. `pending` marks a 408
    with a JSON body.
    """

    status: int
    bare: bool = False
    pending: bool = False


class Act(Enum):
    ACCEPT = "accept"
    AGAIN = "again"  # the same request, after `delay_s`
    PAUSE = "pause"  # no submission of the process starts for a while
    RESUBMIT = "resubmit"  # the same sample under a new seq_id
    FATAL = "fatal"


@dataclass(frozen=True, slots=True)
class Reaction:
    act: Act
    delay_s: float = 0.0


class Row(Enum):
    """The reaction that a table prescribes for one class of replies."""

    ACCEPT = "accept"
    NOW = "again at once"
    NOW_400 = "again at once, a few times in a row"
    BACK_OFF = "again after 1, 2, 4 ... 30 s"
    BACKPRESSURE = "the process pauses"
    BILLING = "again after 5 s"
    SECOND = "again after 1 s"
    SECOND_400 = "again after 1 s, a few times in a row"
    RESUBMIT = "again under a new seq_id"
    FATAL = "the user sees an error"


Table = dict[str, Row]

ASAMPLE: Final[Table] = {
    "200": Row.ACCEPT,
    "bare 400": Row.BACK_OFF,
    "402": Row.BILLING,
    "408": Row.BACK_OFF,
    "409": Row.BACK_OFF,
    "429": Row.BACKPRESSURE,
    "5xx": Row.BACK_OFF,
    "no reply": Row.BACK_OFF,
    "other": Row.FATAL,
}

RETRIEVE: Final[Table] = {
    "200": Row.ACCEPT,
    "400": Row.NOW_400,
    "bare 400": Row.BACK_OFF,
    "402": Row.BILLING,
    "408": Row.NOW,
    "410": Row.RESUBMIT,
    "429": Row.BACK_OFF,
    "5xx": Row.NOW,
    "no reply": Row.BACK_OFF,
    "other": Row.FATAL,
}

SESSION_POLL: Final[Table] = {
    "200": Row.ACCEPT,
    "400": Row.SECOND_400,
    "bare 400": Row.SECOND,
    "402": Row.BILLING,
    "408": Row.SECOND,
    "409": Row.SECOND,
    "429": Row.SECOND,
    "5xx": Row.SECOND,
    "no reply": Row.SECOND,
    "other": Row.FATAL,
}


# Session and configuration calls, which the SDK's transport retries.
SETUP: Final[Table] = {
    "200": Row.ACCEPT,
    "bare 400": Row.FATAL,
    "408": Row.BACK_OFF,
    "409": Row.BACK_OFF,
    "429": Row.BACK_OFF,
    "5xx": Row.BACK_OFF,
    "no reply": Row.BACK_OFF,
    "other": Row.FATAL,
}


@dataclass(frozen=True, slots=True)
class Streak:
    """The memory of a retry loop: failures that count towards the back-off, and 400s in a row."""

    failures: int = 0
    bad_requests: int = 0


def row(table: Mapping[str, Row], event: ReplyEvent) -> Row:
    """Return the row for `event`; an exact status wins over its class."""
    if event.status == 0:
        return table["no reply"]
    names = ["bare 400" if event.bare else str(event.status), *["5xx"] * (event.status >= 500), "other"]
    return next(table[name] for name in names if name in table)


def on_asample(event: ReplyEvent, streak: Streak, elapsed_s: float) -> tuple[Reaction, Streak]:
    """Decide on a reply to `asample`. `elapsed_s` counts from the first attempt under this seq_id."""
    verdict = row(ASAMPLE, event)
    if verdict is Row.BACKPRESSURE:
        return Reaction(Act.PAUSE), Streak()
    if verdict is Row.BACK_OFF:
        delay_s = back_off_s(streak.failures)
        if elapsed_s >= E5_WINDOW_S:
            return Reaction(Act.RESUBMIT), Streak()
        # The last attempt falls on the end of the window, not after it.
        return Reaction(Act.AGAIN, min(delay_s, E5_WINDOW_S - elapsed_s)), Streak(streak.failures + 1)
    return _REACTIONS[verdict], streak


def on_retrieve(event: ReplyEvent, streak: Streak) -> tuple[Reaction, Streak]:
    verdict = row(RETRIEVE, event)
    if verdict is Row.BACK_OFF:
        return Reaction(Act.AGAIN, back_off_s(streak.failures)), replace(streak, failures=streak.failures + 1)
    # Any answer but 429 resets the back-off; only a proper "still pending" resets the count of 400s.
    calm = Streak(0, 0 if event.pending else streak.bad_requests)
    if verdict is Row.NOW_400:
        return _tolerate(calm, 0.0)
    return _REACTIONS[verdict], calm


def on_session_poll(event: ReplyEvent, streak: Streak) -> tuple[Reaction, Streak]:
    verdict = row(SESSION_POLL, event)
    if verdict is Row.SECOND_400:
        return _tolerate(streak, SESSION_POLL_RETRY_S)
    return _REACTIONS[verdict], Streak()


def on_setup(event: ReplyEvent, streak: Streak) -> tuple[Reaction, Streak]:
    verdict = row(SETUP, event)
    if verdict is not Row.BACK_OFF:
        return _REACTIONS[verdict], streak
    if streak.failures >= _SETUP_RETRIES:
        return Reaction(Act.FATAL), streak
    return Reaction(Act.AGAIN, min(0.5 * 2**streak.failures, _OUTER_CAP_S)), Streak(streak.failures + 1)


def back_off_s(failures: int) -> float:
    """Return 1, 2, 4 ... 30 s after 0, 1, 2 ... earlier failures."""
    return _BACKOFF_CAP_S if failures >= 5 else float(2**failures)


def resubmit_delay_s(resubmissions: int, uniform: float) -> float:
    """Return 0.5 * 2^n s up to 10 s, plus or minus a quarter by `uniform` in [0, 1)."""
    base_s = _OUTER_CAP_S if resubmissions >= 5 else 0.5 * 2**resubmissions
    return base_s * (0.75 + 0.5 * uniform)


def _tolerate(streak: Streak, delay_s: float) -> tuple[Reaction, Streak]:
    if streak.bad_requests >= _TOLERATED_400S:
        return Reaction(Act.FATAL), streak
    return Reaction(Act.AGAIN, delay_s), replace(streak, bad_requests=streak.bad_requests + 1)


_REACTIONS: Final = {
    Row.ACCEPT: Reaction(Act.ACCEPT),
    Row.NOW: Reaction(Act.AGAIN),
    Row.SECOND: Reaction(Act.AGAIN, SESSION_POLL_RETRY_S),
    Row.BILLING: Reaction(Act.AGAIN, BILLING_PAUSE_S),
    Row.RESUBMIT: Reaction(Act.RESUBMIT),
    Row.FATAL: Reaction(Act.FATAL),
}
