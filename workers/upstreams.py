"""The upstreams as this worker sees them: which one next, which one rests, what they offer.

Busy is not broken. Only a fault that says so (`Fault.upstream_down`: refused, reset, a dead engine) rests an upstream,
for a time that grows while it keeps failing; one success ends it. When all rest, the one whose rest ends first is asked
all the same: the gateway in front of a single upstream must notice its return.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from yarl import URL

from shared.channel import UpstreamStatus

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable, Sequence

    from shared.core.faults import BreakKind

_FIRST_REST_S: Final = 1.0
# Long enough not to hammer a dead host, short enough that a restarted vLLM (minutes to load) is found at once.
_LONGEST_REST_S: Final = 10.0
# vLLM after SIGTERM keeps old connections open, without a byte, until the client gives up (observed: 40 s and more),
# while it refuses new ones. Five seconds of refusals tell it from a restart behind a proxy.
REFUSED_FOR_S: Final = 5.0


@dataclass(eq=False, slots=True)
class Attempt:
    """One exchange under way. Whoever sets `broken` and cancels the task makes it end as that Fault."""

    task: asyncio.Task[None]
    broken: BreakKind | None = None

    def break_off(self, kind: BreakKind) -> None:
        if self.broken is None:
            self.broken = kind
            self.task.cancel()


@dataclass(eq=False, slots=True)
class Upstream:
    """One vLLM server or router. Identity is the object: a URL given twice is two entries."""

    url: str
    failures: int = 0
    resting_until_s: float = 0.0
    refused_since_s: float | None = None
    attempts: set[Attempt] = field(default_factory=set)
    completions_url: URL = field(init=False)
    models_url: URL = field(init=False)

    def __post_init__(self) -> None:
        base = self.url.rstrip("/")
        self.completions_url = URL(base + "/v1/completions")
        self.models_url = URL(base + "/v1/models")

    @property
    def in_flight(self) -> int:
        return len(self.attempts)

    def rests(self, now_s: float) -> bool:
        return now_s < self.resting_until_s

    def failed(self, now_s: float) -> None:
        """It is broken, not busy: rest it."""
        self.failures += 1
        # Many requests fail at once when one server dies: they are one failure.
        if not self.rests(now_s):
            rest_s = min(_FIRST_REST_S * 2 ** min(self.failures - 1, 10), _LONGEST_REST_S)
            self.resting_until_s = now_s + rest_s

    def refused(self, now_s: float) -> None:
        """It took no connection. A slow accept is not a refusal: a saturated router takes its time."""
        if self.refused_since_s is None:
            self.refused_since_s = now_s

    def accepted(self) -> None:
        """It took a connection."""
        self.refused_since_s = None

    def succeeded(self) -> None:
        self.failures = 0
        self.resting_until_s = 0.0
        self.refused_since_s = None

    def holds_open_while_refusing(self, now_s: float) -> bool:
        """It refuses new connections for so long that its open requests will never be answered."""
        since_s = self.refused_since_s
        return bool(self.attempts) and since_s is not None and now_s - since_s >= REFUSED_FOR_S

    def status(self, now_s: float) -> UpstreamStatus:
        return UpstreamStatus(self.url, "resting" if self.rests(now_s) else "up", self.in_flight, self.failures)


def choose(upstreams: Sequence[Upstream], now_s: float, avoid: Upstream | None = None) -> Upstream:
    """The upstream to ask next: awake, least in flight, and not the one that has just failed if there is another."""
    awake = [upstream for upstream in upstreams if not upstream.rests(now_s)]
    if not awake:
        return min(upstreams, key=lambda upstream: upstream.resting_until_s)
    others = [upstream for upstream in awake if upstream is not avoid] or awake
    return min(others, key=_in_flight)


def all_rest(upstreams: Iterable[Upstream], now_s: float) -> bool:
    return all(upstream.rests(now_s) for upstream in upstreams)


def _in_flight(upstream: Upstream) -> int:
    return upstream.in_flight
