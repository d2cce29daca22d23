"""The counts and times of one client process.

This module needs only the standard library, since it also runs under the interpreter of an SDK.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

# Enough to see what went wrong, without keeping every message of a broken run.
MAX_EXAMPLES: Final = 5


@dataclass(slots=True)
class LoadTally:
    """Count outcomes and record times.

    `submit_s` is the time from the first post to the promise, `latency_s` from the user's call to the checked result.
    `spans_s` and `promises_s` hold pairs of monotonic times, which all processes of a machine share: the last
    submission and the result of each success; the first post and the promise of each accepted submission.
    """

    completed: int = 0
    failed: int = 0
    wrong: int = 0
    cancelled: int = 0
    resubmitted: int = 0
    submitted: int = 0
    duplicates: int = 0
    abandoned_polls: int = 0
    polls: int = 0
    session_polls: int = 0
    paused: int = 0
    heartbeats: int = 0
    heartbeats_failed: int = 0
    heartbeat_max_s: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    submit_s: array[float] = field(default_factory=lambda: array("f"))
    latency_s: array[float] = field(default_factory=lambda: array("f"))
    spans_s: array[float] = field(default_factory=lambda: array("d"))
    promises_s: array[float] = field(default_factory=lambda: array("d"))

    @property
    def ended(self) -> int:
        return self.completed + self.failed + self.cancelled

    def succeed(self, called_s: float, submitted_s: float, now_s: float) -> None:
        """Count a success. `submitted_s` is when the attempt that succeeded began, after any resubmission."""
        self.completed += 1
        self.latency_s.append(now_s - called_s)
        self.spans_s.extend((submitted_s, now_s))

    def promise(self, posted_s: float, now_s: float) -> None:
        self.submitted += 1
        self.promises_s.extend((posted_s, now_s))

    def fail(self, kind: str, detail: str, *, wrong: bool = False) -> None:
        """Count a failure. `wrong` means that a result arrived but is not the sample's own."""
        self.failed += 1
        self.wrong += wrong
        self.failures[kind] += 1
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(f"{kind}: {detail}")

    def beat(self, took_s: float, ok: bool) -> None:
        self.heartbeats += 1
        self.heartbeats_failed += not ok
        self.heartbeat_max_s = max(self.heartbeat_max_s, took_s)
