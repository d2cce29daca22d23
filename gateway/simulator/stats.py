"""What a simulated vLLM has seen: enough to tell whether anything was executed twice, or at the same time."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

_ATTEMPT: Final = re.compile(r"-a\d+$")


def sample_id(request_id: str) -> str:
    """The sample behind an `X-Request-Id`: without the attempt that the gateway appends."""
    return _ATTEMPT.sub("", request_id)


@dataclass(slots=True)
class Stats:
    received: int = 0
    executions: int = 0
    in_flight: int = 0
    peak_in_flight: int = 0
    completed: int = 0
    aborted: int = 0
    concurrent_duplicates: int = 0
    connections: int = 0
    by_source_ip: Counter[str] = field(default_factory=Counter)
    _by_sample: Counter[str] = field(default_factory=Counter)
    _running: Counter[str] = field(default_factory=Counter)

    def receive(self, source_ip: str) -> None:
        self.received += 1
        self.by_source_ip[source_ip] += 1

    def start(self, sample: str) -> None:
        """A generation begins."""
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

    def report(self) -> dict[str, Any]:
        return {
            "received": self.received,
            "executions": self.executions,
            "in_flight": self.in_flight,
            "peak_in_flight": self.peak_in_flight,
            "completed": self.completed,
            "aborted": self.aborted,
            "concurrent_duplicates": self.concurrent_duplicates,
            "connections": self.connections,
            "by_source_ip": dict(self.by_source_ip),
            "by_request_id": {name: count for name, count in self._by_sample.items() if count > 1},
        }
