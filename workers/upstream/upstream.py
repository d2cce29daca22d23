"""The upstreams as this worker sees them: which one next, which one rests, what they offer.

Busy is not broken. Only a fault that says so (`Fault.upstream_down`: refused, reset, a dead engine) rests an upstream,
for a time that grows while it keeps failing. When that is over it must answer a probe before it is given samples again;
one success ends it, too. When all rest, the one whose rest ends first is asked all the same: the gateway in front of a
single upstream must notice its return.

A sampling session stays with one upstream, for its prefix cache, as long as that one is not much busier than the others
(consistent hashing with bounded loads; Mirrokni, Thorup, Zadimoghaddam 2016). Every worker finds the same one.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from yarl import URL

from shared.channel import UpstreamStatus
from shared.core.upstream_protocol import UpstreamProtocol
from shared.histogram import Histogram

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from workers.upstream.client.port import Exchange

_FIRST_REST_S: Final = 1.0
# Long enough not to hammer a dead host, short enough that a restarted vLLM (minutes to load) is found at once.
_LONGEST_REST_S: Final = 10.0
# vLLM after SIGTERM keeps old connections open, without a byte, until the client gives up (observed: 40 s and more),
# while it refuses new ones. Five seconds of refusals tell it from a restart behind a proxy.
REFUSED_FOR_S: Final = 5.0
# An upstream that has just completed a sample, or answered a probe, is not asked for a sign of life: sixty workers that
# ask a busy server every two seconds are a load of their own.
_QUIET_S: Final = 4.0
# How many times the mean load a session's own upstream may have before others take its samples.
_HOME_SHARE: Final = 1.25
_HASH_MASK: Final = 2**64 - 1


@dataclass(eq=False, slots=True)
class Upstream:
    """One vLLM server or router. Identity is the object: a URL given twice is two entries."""

    url: str
    failures: int = 0
    failures_ever: int = 0
    last_failure: str = ""
    resting_until_s: float = 0.0
    on_probation: bool = False
    refused_since_s: float | None = None
    heard_s: float = float("-inf")
    attempts: set[Exchange] = field(default_factory=set)
    sent: int = 0
    faults: int = 0
    wasted_s: float = 0.0
    queue: Histogram = field(default_factory=Histogram)
    latency: Histogram = field(default_factory=Histogram)
    protocol: UpstreamProtocol = UpstreamProtocol.COMPLETIONS
    protocol_known: bool = True
    lacks_generate: bool = False
    completions_url: URL = field(init=False)
    generate_url: URL = field(init=False)
    models_url: URL = field(init=False)
    load_adapter_url: URL = field(init=False)
    _salt: int = field(init=False)

    def __post_init__(self) -> None:
        base = self.url.rstrip("/")
        self.completions_url = URL(base + UpstreamProtocol.COMPLETIONS.path)
        self.generate_url = URL(base + UpstreamProtocol.GENERATE.path)
        self.models_url = URL(base + "/v1/models")
        self.load_adapter_url = URL(base + "/v1/load_lora_adapter")
        self._salt = int.from_bytes(blake2b(base.encode(), digest_size=8).digest(), "big") | 1

    @property
    def in_flight(self) -> int:
        return len(self.attempts)

    def samples_url(self, protocol: UpstreamProtocol) -> URL:
        return self.generate_url if protocol is UpstreamProtocol.GENERATE else self.completions_url

    def answered(self, exchange: Exchange, now_s: float) -> None:
        """With the whole body of a 200."""
        sent_s = exchange.sent_s or exchange.begun_s
        self.queue.add(sent_s - exchange.begun_s)
        self.latency.add(now_s - sent_s)

    def cut_off(self, exchange: Exchange, now_s: float) -> None:
        """We closed the connection of a request that ran: what it had generated is lost, and never told."""
        if exchange.sent_s is not None:
            self.wasted_s += now_s - exchange.sent_s

    def rests(self, now_s: float) -> bool:
        return self.on_probation or now_s < self.resting_until_s

    def failed(self, now_s: float, why: str = "") -> None:
        """It is broken, not busy: rest it. `why` is for the log."""
        self.failures += 1
        self.on_probation = True
        self.failures_ever += 1
        self.last_failure = why
        # Many requests fail at once when one server dies: they are one failure.
        if now_s >= self.resting_until_s:
            rest_s = min(_FIRST_REST_S * 2 ** min(self.failures - 1, 10), _LONGEST_REST_S)
            self.resting_until_s = now_s + rest_s

    def refused(self, now_s: float) -> None:
        """It took no connection. A slow accept is not a refusal: a saturated router takes its time."""
        if self.refused_since_s is None:
            self.refused_since_s = now_s

    def accepted(self) -> None:
        """It took a connection."""
        self.refused_since_s = None

    def succeeded(self, now_s: float) -> None:
        """It completed a sample."""
        self.heard_s = now_s
        self.failures = 0
        self.on_probation = False
        self.resting_until_s = 0.0
        self.refused_since_s = None

    def answered_probe(self, now_s: float) -> None:
        """It lives. Whether it completes samples is for the next one to show: its failures still count."""
        self.heard_s = now_s
        self.on_probation = self.on_probation and now_s < self.resting_until_s

    def in_doubt(self, now_s: float) -> bool:
        """Whether a probe would tell something new."""
        if self.failures or self.refused_since_s is not None:
            return True
        return bool(self.attempts) and now_s - self.heard_s >= _QUIET_S

    def holds_open_while_refusing(self, now_s: float) -> bool:
        """It refuses new connections for so long that its open requests will never be answered."""
        since_s = self.refused_since_s
        return bool(self.attempts) and since_s is not None and now_s - since_s >= REFUSED_FOR_S

    def status(self, now_s: float, *, leaving: bool = False) -> UpstreamStatus:
        return UpstreamStatus(
            url=self.url,
            state="leaving" if leaving else "resting" if self.rests(now_s) else "up",
            in_flight=self.in_flight,
            failures=self.failures,
            attempts=self.sent,
            faults=self.faults,
            wasted_ms=int(self.wasted_s * 1000),
            queue=self.queue.snapshot(),
            latency=self.latency.snapshot(),
            protocol=self.protocol.value if self.protocol_known else None,
            lacks_generate=self.lacks_generate,
        )

    def attraction(self, session: int) -> int:
        """The upstream with the highest is a session's own."""
        return session * self._salt & _HASH_MASK


def choose(
    upstreams: Sequence[Upstream], now_s: float, avoid: Upstream | None = None, session_key: str = ""
) -> Upstream:
    """The upstream to ask next: awake, and not the one that has just failed if there is another.

    Of these the session's own, unless it is much busier than the others; else the one with the least in flight.
    """
    # As `rests`, which is a call for each upstream and sample.
    awake = [upstream for upstream in upstreams if not upstream.on_probation and now_s >= upstream.resting_until_s]
    if not awake:
        return min(upstreams, key=lambda upstream: upstream.resting_until_s)
    others = awake if avoid is None else [upstream for upstream in awake if upstream is not avoid] or awake
    if len(others) == 1:
        return others[0]
    if session_key and not _is_overloaded(home := _home(others, session_key), others):
        return home
    return min(others, key=_in_flight)


def _home(upstreams: Sequence[Upstream], session_key: str) -> Upstream:
    session = zlib.crc32(session_key.encode())
    return max(upstreams, key=lambda upstream: upstream.attraction(session))


def _is_overloaded(home: Upstream, upstreams: Sequence[Upstream]) -> bool:
    """Whether one more sample puts it above its share of all that runs then."""
    total = sum([len(upstream.attempts) for upstream in upstreams]) + 1
    return home.in_flight + 1 > math.ceil(_HOME_SHARE * total / len(upstreams))


def all_rest(upstreams: Iterable[Upstream], now_s: float) -> bool:
    return all(upstream.rests(now_s) for upstream in upstreams)


def _in_flight(upstream: Upstream) -> int:
    return upstream.in_flight
