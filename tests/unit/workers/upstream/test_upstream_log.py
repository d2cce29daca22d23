"""What the log hears of upstreams that come and go."""

from __future__ import annotations

import logging

import pytest

from workers.upstream.upstream import Upstream, UpstreamLog

FAILS, BACK = "upstream is down: it gets no samples until it answers again", "upstream is up again"


class Watched:
    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        self.upstream = Upstream("http://a")
        self.news = UpstreamLog()
        self.caplog = caplog

    def lines_at(self, now_s: float) -> list[tuple[str, int]]:
        """What is said when it is looked at then: message, and failures since the last line."""
        self.caplog.clear()
        self.news.look([self.upstream], now_s)
        return [(record.message, record.failures) for record in self.caplog.records]  # type: ignore[attr-defined] # extra


@pytest.fixture
def watched(caplog: pytest.LogCaptureFixture) -> Watched:
    return Watched(caplog)


def test_an_upstream_that_works_is_not_spoken_of(watched: Watched) -> None:
    watched.upstream.succeeded(0.0)
    assert watched.lines_at(0.0) == []


def test_a_change_is_told_once_with_the_reason_and_a_count(watched: Watched) -> None:
    for _ in range(500):
        watched.upstream.failed(0.0, "connection refused")
    assert watched.lines_at(2.0) == [(FAILS, 500)]
    assert watched.caplog.records[0].error == "connection refused"  # type: ignore[attr-defined] # extra
    watched.upstream.failed(3.0)
    assert watched.lines_at(4.0) == watched.lines_at(60.0) == []
    watched.upstream.succeeded(0.0)
    assert watched.lines_at(62.0) == [(BACK, 1)]


def test_what_comes_and_goes_is_one_line_in_thirty_seconds_and_the_last_state_is_told(watched: Watched) -> None:
    said: list[str] = []
    for second in range(0, 60, 2):
        watched.upstream.failed(float(second))
        said += [message for message, _ in watched.lines_at(float(second))]
        watched.upstream.succeeded(0.0)
        said += [message for message, _ in watched.lines_at(second + 1.0)]
    assert said == [FAILS, BACK]
    assert watched.lines_at(100.0)[0][0] == BACK
    assert watched.lines_at(200.0) == []


def test_a_failure_between_two_looks_is_told_as_over(watched: Watched) -> None:
    watched.upstream.failed(0.0)
    watched.upstream.succeeded(0.0)
    assert watched.lines_at(2.0) == [(BACK, 1)]


def test_an_upstream_that_left_the_list_is_forgotten(watched: Watched) -> None:
    watched.upstream.failed(0.0)
    watched.lines_at(0.0)
    watched.news.look([], 1.0)
    assert watched.lines_at(2.0) == [(FAILS, 1)]
