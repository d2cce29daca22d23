"""One upstream as this worker sees it, and how one is chosen.

Busy is not broken. Only a fault that says so (`Fault.upstream_down`: refused, reset, a dead engine) takes an upstream
down, for a time that grows while it keeps failing. After that time it must answer a probe before it gets samples again;
a completed sample also ends it. If all are down, the one that comes up first is asked all the same: a gateway in front
of a single upstream must notice its return.

A sampling session stays with one upstream, for its prefix cache, as long as that one is not much busier than the others
(consistent hashing with bounded loads; Mirrokni, Thorup, Zadimoghaddam 2016). All workers choose the same one.
"""

from __future__ import annotations

import logging
import math
import zlib
from dataclasses import dataclass, field
from hashlib import blake2b
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from yarl import URL

from shared.channel import UpstreamStatus
from shared.core.upstream_protocol import UpstreamProtocol
from shared.histogram import Histogram

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from workers.upstream.client.port import Exchange

log = logging.getLogger(__name__)

_FIRST_DOWN_S: Final = 1.0
# Long enough to spare a dead host, short enough to find a restarted vLLM, which loads for minutes, at once.
_LONGEST_DOWN_S: Final = 10.0
# vLLM after SIGTERM keeps old connections open without a byte until the client gives up (40 s and more were observed),
# while it refuses new ones. Five seconds of refusals distinguish this from a restart behind a proxy.
REFUSED_FOR_S: Final = 5.0
# An upstream that has just completed a sample or answered a probe is not probed: sixty workers that probe a busy server
# every two seconds are a load of their own.
_QUIET_S: Final = 4.0
# A session's home may have this many times the mean load before others take its samples.
_HOME_SHARE: Final = 1.25
_HASH_MASK: Final = 2**64 - 1
# One upstream that comes and goes must not fill the log of every worker.
_LOG_EVERY_S: Final = 30.0


@dataclass(eq=False, slots=True)
class Upstream:
    """One vLLM server or router. A URL that is given twice is two upstreams."""

    url: str
    failures: int = 0
    failures_ever: int = 0
    last_failure: str = ""
    down_until_s: float = 0.0
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
    # Where samples go, by protocol.
    samples_urls: dict[UpstreamProtocol, URL] = field(init=False)
    models_url: URL = field(init=False)
    load_adapter_url: URL = field(init=False)
    salt: int = field(init=False)

    def __post_init__(self) -> None:
        base = self.url.rstrip("/")
        self.samples_urls = {protocol: URL(base + protocol.path) for protocol in UpstreamProtocol}
        self.models_url = URL(base + "/v1/models")
        self.load_adapter_url = URL(base + "/v1/load_lora_adapter")
        self.salt = int.from_bytes(blake2b(base.encode(), digest_size=8).digest(), "big") | 1

    @property
    def in_flight(self) -> int:
        return len(self.attempts)

    def answered(self, exchange: Exchange, now_s: float) -> None:
        """Count a whole reply with status 200."""
        sent_s = exchange.sent_s or exchange.begun_s
        self.queue.add(sent_s - exchange.begun_s)
        self.latency.add(now_s - sent_s)

    def cut_off(self, exchange: Exchange, now_s: float) -> None:
        """Count the time of a running request whose connection we closed: what it generated is lost."""
        if exchange.sent_s is not None:
            self.wasted_s += now_s - exchange.sent_s

    def is_down(self, now_s: float) -> bool:
        return self.on_probation or now_s < self.down_until_s

    def failed(self, now_s: float, why: str = "") -> None:
        """Take it down: it is broken, not busy. `why` is for the log."""
        self.failures += 1
        self.on_probation = True
        self.failures_ever += 1
        self.last_failure = why
        # A dying server fails many requests at once: they are one failure.
        if now_s >= self.down_until_s:
            down_s = min(_FIRST_DOWN_S * 2 ** min(self.failures - 1, 10), _LONGEST_DOWN_S)
            self.down_until_s = now_s + down_s

    def refused(self, now_s: float) -> None:
        """Note that it refused a connection. A slow accept, such as a saturated router's, is not a refusal."""
        if self.refused_since_s is None:
            self.refused_since_s = now_s

    def accepted(self) -> None:
        """Note that it accepted a connection."""
        self.refused_since_s = None

    def succeeded(self, now_s: float) -> None:
        """Note that it completed a sample."""
        self.heard_s = now_s
        self.failures = 0
        self.on_probation = False
        self.down_until_s = 0.0
        self.refused_since_s = None

    def answered_probe(self, now_s: float) -> None:
        """Note that it is alive. Its failures still count until it completes a sample."""
        self.heard_s = now_s
        self.on_probation = self.on_probation and now_s < self.down_until_s

    def in_doubt(self, now_s: float) -> bool:
        """Return whether a probe would bring news."""
        if self.failures or self.refused_since_s is not None:
            return True
        return bool(self.attempts) and now_s - self.heard_s >= _QUIET_S

    def holds_open_while_refusing(self, now_s: float) -> bool:
        """Return whether it has refused connections for so long that its open requests will never be answered."""
        since_s = self.refused_since_s
        return bool(self.attempts) and since_s is not None and now_s - since_s >= REFUSED_FOR_S

    def status(self, now_s: float, *, leaving: bool = False) -> UpstreamStatus:
        return UpstreamStatus(
            url=self.url,
            state="leaving" if leaving else "resting" if self.is_down(now_s) else "up",
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


def choose(
    upstreams: Sequence[Upstream], now_s: float, avoid: Upstream | None = None, session_key: str = ""
) -> Upstream:
    """Choose the upstream to ask next: one that is up, and not the one that has just failed if there is another.

    Of these, choose the session's home unless it is much busier than the others; else the one with the least in flight.
    """
    # As `is_down`, without a call for each upstream and sample.
    up = [upstream for upstream in upstreams if not upstream.on_probation and now_s >= upstream.down_until_s]
    if not up:
        return min(upstreams, key=lambda upstream: upstream.down_until_s)
    others = up if avoid is None else [upstream for upstream in up if upstream is not avoid] or up
    if len(others) == 1:
        return others[0]
    if session_key and not _is_overloaded(home := _home(others, session_key), others):
        return home
    return min(others, key=attrgetter("in_flight"))


def _home(upstreams: Sequence[Upstream], session_key: str) -> Upstream:
    """Return the upstream that ranks highest for this session."""
    session = zlib.crc32(session_key.encode())
    return max(upstreams, key=lambda upstream: session * upstream.salt & _HASH_MASK)


def _is_overloaded(home: Upstream, upstreams: Sequence[Upstream]) -> bool:
    """Return whether one more sample would put `home` above its share of all that runs."""
    total = sum([len(upstream.attempts) for upstream in upstreams]) + 1
    return home.in_flight + 1 > math.ceil(_HOME_SHARE * total / len(upstreams))


@dataclass(slots=True)
class _Logged:
    """The last line of the log about one upstream."""

    at_s: float = float("-inf")
    fails: bool = False
    failures: int = 0


class UpstreamLog:
    """Logs that an upstream fails and that it is back: a line for each change, not for each request.

    It looks at regular times (`UpstreamPool.probe`), so it adds nothing to the path of a sample.
    """

    def __init__(self) -> None:
        self._logged: dict[str, _Logged] = {}

    def look(self, upstreams: Iterable[Upstream], now_s: float) -> None:
        """Log what has changed since the last line about each upstream."""
        before, self._logged = self._logged, {}
        for upstream in upstreams:
            logged = self._logged[upstream.url] = before.get(upstream.url) or _Logged()
            fails = upstream.failures > 0
            has_changed = fails != logged.fails or (not fails and upstream.failures_ever > logged.failures)
            if has_changed and now_s - logged.at_s >= _LOG_EVERY_S:
                _log_state(upstream, logged, now_s)


def _log_state(upstream: Upstream, logged: _Logged, now_s: float) -> None:
    fails = upstream.failures > 0
    failures = upstream.failures_ever - logged.failures
    fields = {"upstream": upstream.url, "failures": failures, "error": upstream.last_failure}
    if fails:
        log.warning("upstream is down: it gets no samples until it answers again", extra=fields)
    else:
        log.info("upstream is up again", extra=fields)
    logged.at_s, logged.fails, logged.failures = now_s, fails, upstream.failures_ever
