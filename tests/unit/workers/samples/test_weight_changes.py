from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from shared.clock import ManualClock
from shared.counters import Counters
from workers.samples.weight_changes import WeightNews
from workers.upstream.upstream import Upstream

if TYPE_CHECKING:
    import pytest


class Sample:
    request_id = "gwss-1:3"


def test_every_sequence_counts_and_the_log_is_not_flooded(caplog: pytest.LogCaptureFixture) -> None:
    clock, counters, sample = ManualClock(), Counters(), Sample()
    news, running, upstream = WeightNews(counters, clock), _as_any(sample), Upstream("http://a")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            news.changed(running, upstream, (("step-1", "step-2"), ("step-1", "step-2")))
        clock.advance(60.0)
        news.changed(running, upstream, (("step-2", "step-3"),))
        news.changed(running, Upstream("http://b"), (("x", "y"),))
    assert counters.mixed_weights == 8
    told = [vars(record) for record in caplog.records]
    assert [(line["upstream"], line["versions"], line["samples_not_told"]) for line in told] == [
        ("http://a", ["step-1", "step-2"], 0),
        ("http://a", ["step-2", "step-3"], 2),
        ("http://b", ["x", "y"], 0),
    ]
    assert {line["request_id"] for line in told} == {"gwss-1:3"}


def _as_any(value: Any) -> Any:
    return value
