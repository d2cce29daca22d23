"""What can go wrong with one upstream attempt, as a small closed set.

How an HTTP reply or a broken connection becomes one of these is decided in `classify_*` below, row by row as in
docs/architecture.md; what is then done about it is decided in `retry.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from shared.core.model import Category


class FaultClass(Enum):
    NEVER_EXECUTED = "never_executed"  # safe to send again
    INTERRUPTED = "interrupted"  # began, perhaps; a bounded number of executions more
    ABORTED = "aborted"  # the engine gave it up (200 "abort"); bounded more generously
    AMBIGUOUS = "ambiguous"  # may have run to its end; final unless --retry-ambiguous
    REFUSED = "refused"  # the request itself is at fault; final


@dataclass(frozen=True, slots=True)
class Fault:
    """One failed attempt.

    `message` is for the SDK's user and the log: the upstream's own words, shortened. `upstream_down`: rest this
    upstream before it is chosen again (busy is not broken: 4xx, 429 and slowness never set it).
    """

    kind: FaultClass
    message: str
    category: Category = Category.SERVER
    retry_after_s: float | None = None
    upstream_down: bool = False
