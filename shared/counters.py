"""A worker's counters: plain integers, sent once a second to the supervisor, which adds them up across restarts.

An increment costs tens of nanoseconds. Prometheus, `/status` and the bench report show figures made from these.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Final

from shared.histogram import Histogram

if TYPE_CHECKING:
    from shared.core.faults import FaultClass


@dataclass(frozen=True, slots=True)
class Stages:
    """The time that samples spend at each stage in a worker; time at an upstream is counted for each upstream."""

    accept: Histogram = field(default_factory=Histogram)  # entering it into the store, before the promise
    store: Histogram = field(default_factory=Histogram)  # from its ending until that is written
    delivery: Histogram = field(default_factory=Histogram)  # from there until this worker has delivered it

    def snapshot(self) -> dict[str, tuple[float, ...]]:
        return {field.name: getattr(self, field.name).snapshot() for field in fields(self)}


@dataclass(slots=True)
class Counters:
    """The counters of one worker; each field is a name in `Status.counters`."""

    begun: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    stale: int = 0
    orphaned: int = 0
    delivered: int = 0
    acknowledged: int = 0
    expired_undelivered: int = 0
    duplicates_suppressed: int = 0
    reexecutions: int = 0
    attempts: int = 0
    faults_never_executed: int = 0
    faults_interrupted: int = 0
    faults_aborted: int = 0
    faults_wrong_reply: int = 0
    faults_ambiguous: int = 0
    faults_refused: int = 0
    rejected_in_flight: int = 0
    rejected_bytes: int = 0
    rejected_store: int = 0
    rejected_draining: int = 0
    rejected_key: int = 0
    rejected_share: int = 0
    rejected_upstream: int = 0
    rejected_unexpected: int = 0
    polls: int = 0
    polls_abandoned: int = 0
    session_polls: int = 0
    http_requests: int = 0
    http_client_errors: int = 0
    http_server_errors: int = 0
    tokens_sampled: int = 0
    mixed_weights: int = 0
    openai_requests: int = 0
    training_requests: int = 0
    training_failures: int = 0
    store_commands: int = 0
    result_bytes: int = 0
    results_late: int = 0
    adapter_loads: int = 0
    adapter_loads_failed: int = 0
    stages: Stages = field(default_factory=Stages)

    def answered(self, status: int) -> None:
        """Count a reply that is an error; 408 means "still running" and is none."""
        if status >= 500:
            self.http_server_errors += 1
        elif status >= 400 and status != 408:
            self.http_client_errors += 1

    def failed_attempt(self, kind: FaultClass) -> None:
        name = f"faults_{kind.value}"
        setattr(self, name, getattr(self, name) + 1)

    def snapshot(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in NAMES}


NAMES: Final = tuple(field.name for field in fields(Counters) if field.name != "stages")
