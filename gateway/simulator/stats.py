"""The counts of a simulated vLLM: enough to see whether a sample was executed twice, or twice at the same time."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(slots=True)
class Traffic:
    """Bytes of HTTP over a set of connections, without the headers of TCP and IP; the load client counts them too."""

    sent_bytes: int = 0
    received_bytes: int = 0


_ATTEMPT: Final = re.compile(r"-a\d+$")
_COUNTS: Final = (
    "received",
    "executions",
    "waiting",
    "in_flight",
    "peak_in_flight",
    "completed",
    "aborted",
    "concurrent_duplicates",
    "adapter_loads",
    "connections",
)


def sample_id(request_id: str) -> str:
    """Return the sample behind an `X-Request-Id`, without the attempt number that the gateway appends."""
    return _ATTEMPT.sub("", request_id)


@dataclass(slots=True)
class Stats:
    """The counts of one process.

    `aborted` generations ended because the client disconnected or by a scripted fault. `adapter_loads` counts the
    requests to load an adapter. `traffic` covers all connections, those to the control paths included.
    """

    received: int = 0
    executions: int = 0
    waiting: int = 0
    in_flight: int = 0
    peak_in_flight: int = 0
    completed: int = 0
    aborted: int = 0
    concurrent_duplicates: int = 0
    adapter_loads: int = 0
    connections: int = 0
    by_source_ip: Counter[str] = field(default_factory=Counter)
    traffic: Traffic = field(default_factory=Traffic)
    _by_sample: Counter[str] = field(default_factory=Counter)
    _running: Counter[str] = field(default_factory=Counter)

    def receive(self, source_ip: str) -> None:
        self.received += 1
        self.by_source_ip[source_ip] += 1

    def start(self, sample: str) -> None:
        """Count the start of a generation."""
        self.executions += 1
        self.in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        if sample:
            self._by_sample[sample] += 1
            self.concurrent_duplicates += self._running[sample] > 0
            self._running[sample] += 1

    def end(self, sample: str, *, aborted: bool) -> None:
        self.in_flight -= 1
        if aborted:
            self.aborted += 1
        else:
            self.completed += 1
        if sample:
            self._running[sample] -= 1
            if not self._running[sample]:
                del self._running[sample]

    def clear(self) -> None:
        """Count from zero. Requests that wait or run keep their counts, and count as completed or aborted later."""
        self.received = self.executions = self.completed = self.aborted = self.concurrent_duplicates = 0
        self.adapter_loads = 0
        self.peak_in_flight = self.in_flight
        self.by_source_ip.clear()
        self.traffic.received_bytes = self.traffic.sent_bytes = 0
        self._by_sample.clear()

    def snapshot(self) -> dict[str, Any]:
        """Return all counts, for `report`."""
        return {
            **{name: getattr(self, name) for name in _COUNTS},
            "received_bytes": self.traffic.received_bytes,
            "sent_bytes": self.traffic.sent_bytes,
            "by_source_ip": dict(self.by_source_ip),
            "by_sample": dict(self._by_sample),
        }


def report(snapshots: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the document of `/_sim/stats` from the snapshots of all processes.

    `by_request_id` names only the samples that were executed more than once. The peaks of several processes are added,
    although they need not have occurred at the same time, and `concurrent_duplicates` misses a sample that runs in two
    processes at once.
    """
    by_source_ip: Counter[str] = Counter()
    by_sample: Counter[str] = Counter()
    for snapshot in snapshots:
        by_source_ip.update(snapshot["by_source_ip"])
        by_sample.update(snapshot["by_sample"])
    return {
        **{name: sum(snapshot[name] for snapshot in snapshots) for name in (*_COUNTS, "received_bytes", "sent_bytes")},
        "by_source_ip": dict(by_source_ip),
        "by_request_id": {name: count for name, count in by_sample.items() if count > 1},
    }
