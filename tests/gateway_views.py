"""What the supervisor could know at some moment, for tests of what is made from it."""

from __future__ import annotations

from typing import Final

from gateway.admin.key_ledger import KeyView
from gateway.admin.timings import TimingLedger
from gateway.admin.view import SlotView, View
from gateway.machine.kernel import Usage
from shared.channel import Status, UpstreamStatus
from shared.counters import Counters
from shared.histogram import Histogram
from shared.store.contract import StoreInfo


def histogram(*seconds: float) -> tuple[float, ...]:
    made = Histogram()
    for value in seconds:
        made.add(value)
    return made.snapshot()


def worker_status(
    *states: str, in_flight: int = 3, stages: dict[str, tuple[float, ...]] | None = None, latency_s: float = 2.0
) -> Status:
    """Its upstreams http://u0, http://u1 ... in these states, each with two replies and one failure."""
    upstreams = tuple(
        UpstreamStatus(
            f"http://u{number}",
            state,
            in_flight=2,
            failures=1,
            attempts=3,
            faults=1,
            wasted_ms=1500,
            queue=histogram(0.01, 0.01),
            latency=histogram(latency_s, latency_s),
        )
        for number, state in enumerate(states)
    )
    return Status(in_flight, 100, 1.5, 9.0, True, 4, upstreams, {}, stages=stages or Counters().stages.snapshot())


def slot_view(number: int, status: Status | None, state: str = "ready") -> SlotView:
    return SlotView(number, state, "10.0.0.1", 2, 77, 1_700_000_000.0, Usage(1.25, 1000), status, 0)


_STATUSES: Final = (worker_status("up", "resting"), worker_status("resting", "resting", latency_s=4.0))


def ledger() -> TimingLedger:
    made = TimingLedger()
    for serial, status in enumerate(_STATUSES):
        made.update(serial, status)
    return made


VIEW: Final = View(
    url="http://127.0.0.1:8000",
    version="1.2.3",
    started_at_s=1_700_000_000.0,
    stopping=False,
    slots=tuple(slot_view(number, status) for number, status in enumerate(_STATUSES)),
    redis_url="redis://h",
    redis_embedded=False,
    redis=StoreInfo("standalone", "9.1", 10, 100, "noeviction"),
    totals={
        **Counters(begun=9, completed=5, delivered=3, result_bytes=500, faults_interrupted=2).snapshot(),
        "cpu_seconds": 2.5,
    },
    loop_lag_ms=0.25,
    logprobs_scale={"http://u0": False, "http://u1": None},
    since_start=ledger().since_start(),
    last_minute=ledger().last_minute(),
    keys=(KeyView("alice", 3, 300, 7, 2), KeyView("bob", 0, 0, 0, 0)),
)
