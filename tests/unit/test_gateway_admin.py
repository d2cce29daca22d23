from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from gateway.admin import metrics, page, report
from gateway.admin.accumulator import Accumulator
from gateway.admin.view import SlotView, View
from gateway.machine import Usage
from gateway.status import tables
from shared.channel import Status, UpstreamStatus
from shared.counters import Counters
from shared.store.base import StoreInfo


def status(*states: str, in_flight: int = 3) -> Status:
    upstreams = tuple(UpstreamStatus(f"http://u{i}", state, 2, 1) for i, state in enumerate(states))
    return Status(in_flight, 100, 1.5, 9.0, True, 4, upstreams, {})


def slot(number: int, worker: Status | None, state: str = "ready") -> SlotView:
    return SlotView(number, state, "10.0.0.1", 2, 77, 1_700_000_000.0, Usage(1.25, 1000), worker, 0)


VIEW = View(
    url="http://127.0.0.1:8000",
    version="1.2.3",
    started_at_s=1_700_000_000.0,
    stopping=False,
    slots=(slot(0, status("up", "resting")), slot(1, status("resting", "resting"))),
    redis_url="redis://h",
    redis_embedded=False,
    redis=StoreInfo("standalone", "9.1", 10, 100, "noeviction"),
    totals={**Counters(begun=9, completed=5, faults_interrupted=2).snapshot(), "cpu_seconds": 2.5},
    loop_lag_ms=0.25,
)


class TestAccumulator:
    def test_adds_up_over_processes(self) -> None:
        accumulator = Accumulator()
        accumulator.update(1, {"begun": 5})
        accumulator.update(2, {"begun": 7})
        accumulator.update(1, {"begun": 6})
        assert accumulator.count("begun") == 13

    def test_a_death_takes_nothing_away(self) -> None:
        """E2"""
        accumulator = Accumulator()
        accumulator.update(1, {"begun": 5})
        accumulator.forget(1)
        accumulator.update(2, {"begun": 1})
        assert accumulator.count("begun") == 6
        assert accumulator.count("never seen") == 0

    def test_adds_what_no_worker_told(self) -> None:
        """B11: a dead worker's samples are orphaned by the supervisor."""
        accumulator = Accumulator()
        accumulator.update(1, {"orphaned": 5})
        accumulator.add("orphaned", 2)
        accumulator.update(1, {"orphaned": 6})
        assert accumulator.count("orphaned") == 8

    @given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 100), st.booleans()), max_size=50))
    def test_never_falls(self, steps: list[tuple[int, int, bool]]) -> None:
        """E2: not for values that go back, nor for processes that come and go."""
        accumulator = Accumulator()
        highest = 0
        for serial, value, dies in steps:
            accumulator.update(serial, {"n": value})
            if dies:
                accumulator.forget(serial)
            assert accumulator.count("n") >= highest
            highest = accumulator.count("n")


class TestStatus:
    def test_has_every_field_of_the_interface(self) -> None:
        body = report.status(VIEW)
        worker = {"slot", "pid", "source_ip", "state", "in_flight", "in_flight_bytes", "restarts", "cpu_seconds"}
        assert worker | {"rss_bytes", "loop_lag_ms_p99", "started_at"} <= set(body["workers"][0])
        assert {"url", "mode", "version", "used_bytes", "max_bytes", "policy"} <= set(body["redis"])
        assert {"url", "state", "in_flight", "failures"} <= set(body["upstreams"][0])
        samples = {"begun", "completed", "failed", "cancelled", "orphaned", "delivered", "acknowledged"}
        assert samples | {"expired_undelivered", "duplicates_suppressed", "reexecutions"} <= set(body["samples"])
        assert body["sessions"] == 4

    def test_values(self) -> None:
        body = report.status(VIEW)
        assert body["workers"][1]["cpu_seconds"] == 1.25
        assert body["workers"][0]["started_at"] == "2023-11-14T22:13:20Z"
        assert body["samples"]["completed"] == 5

    def test_an_upstream_is_up_when_one_worker_finds_it_up(self) -> None:
        first, second = report.status(VIEW)["upstreams"]
        assert (first["state"], first["in_flight"], first["failures"]) == ("up", 4, 2)
        assert second["state"] == "resting"

    def test_a_slot_without_a_process(self) -> None:
        empty = SlotView(0, "backing off", None, 3, None, None, Usage(), None, 0)
        body = report.status(replace(VIEW, slots=(empty,), redis=None))
        assert body["workers"][0]["pid"] is None
        assert body["redis"]["reachable"] is False
        assert body["upstreams"] == []


class TestReadiness:
    @pytest.mark.parametrize(
        ("changes", "reasons"),
        [
            ({}, []),
            ({"redis": None}, ["Redis does not answer"]),
            ({"slots": (slot(0, status("resting")),)}, ["no upstream is up"]),
            ({"slots": (slot(0, status("unknown")),)}, []),
            ({"slots": (slot(0, status("up"), "starting"),)}, ["no worker is ready"]),
            ({"slots": (slot(0, None),)}, ["no worker is ready"]),
            ({"stopping": True}, ["the gateway is stopping"]),
        ],
    )
    def test_needs_redis_a_worker_and_an_upstream(self, changes: dict[str, Any], reasons: list[str]) -> None:
        ready, body = report.readiness(replace(VIEW, **changes))
        assert (ready, body["reasons"]) == (not reasons, reasons)

    def test_raw_logprobs_are_a_warning(self) -> None:
        """D15"""
        ready, body = report.readiness(replace(VIEW, logprobs_scale={"http://u0": False, "http://u1": None}))
        assert ready
        assert body["logprobs_scale"] == {"http://u0": False, "http://u1": None}
        assert len(body["warnings"]) == 1
        assert "processed_logprobs" in body["warnings"][0]


class TestMetrics:
    @staticmethod
    def samples(view: View) -> dict[tuple[str, str], float]:
        text = metrics.exposition(view).decode()
        return {
            (sample.name, ",".join(sample.labels.values())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def test_every_counter_appears_once(self) -> None:
        found = self.samples(VIEW)
        counters = [key for key in found if key[0].endswith("_total") and key[0] != "gateway_worker_restarts_total"]
        assert len(counters) == len(VIEW.totals)
        assert found["gateway_samples_settled_total", "completed"] == 5
        assert found["gateway_upstream_faults_total", "interrupted"] == 2
        assert found["gateway_samples_begun_total", ""] == 9
        assert found["gateway_worker_cpu_seconds_total", ""] == 2.5

    def test_gauges(self) -> None:
        found = self.samples(replace(VIEW, logprobs_scale={"http://u0": False}))
        assert found["gateway_worker_up", "1"] == 1
        assert found["gateway_samples_in_flight", "0"] == 3
        assert found["gateway_upstream_up", "http://u1"] == 0
        assert found["gateway_upstream_logprobs_raw", "http://u0"] == 1
        assert found["gateway_redis_used_bytes", ""] == 10

    def test_without_redis(self) -> None:
        found = self.samples(replace(VIEW, redis=None))
        assert found["gateway_redis_up", ""] == 0
        assert ("gateway_redis_used_bytes", "") not in found


def test_the_page_escapes_what_it_shows() -> None:
    html = page.page(report.status(replace(VIEW, redis_url="<script>")))
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    assert "none" in page.page(report.status(replace(VIEW, slots=())))


def test_the_page_shows_numbers_for_people_and_a_pid_to_copy() -> None:
    worker = {"pid": 31682, "in_flight": 31682, "rss_bytes": 3 << 20, "store_connected": True, "source_ip": None}
    html = page.page({**report.status(VIEW), "workers": [worker]})
    for cell in ("31682", "31,682", "3.0 MiB", "yes", "-"):
        assert f"<td>{cell}</td>" in html


def test_the_terminal_shows_the_whole_status() -> None:
    from rich.console import Console

    stream = io.StringIO()
    console = Console(width=200, file=stream)
    for view in (VIEW, replace(VIEW, redis=None, stopping=True, slots=())):
        console.print(tables(report.status(view)))
    text = stream.getvalue()
    for expected in (
        "http://127.0.0.1:8000, version 1.2.3",
        "10 B of 100 B",
        "does not answer",
        "stopping",
        "10.0.0.1",
    ):
        assert expected in text
