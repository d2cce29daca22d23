from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admin import page, report
from gateway.admin.accumulator import Accumulator
from gateway.admin.app import admin_app
from gateway.admin.timings import Timings, UpstreamTotals
from gateway.admin.view import SlotView
from gateway.commands.status import tables
from gateway.machine.kernel import Usage
from shared.core.upstream_protocol import NO_GENERATE
from tests.gateway_views import VIEW, histogram, slot_view, worker_status

if TYPE_CHECKING:
    from shared.channel import Status


def timings(fast: float, slow: float) -> Timings:
    upstreams = {f"http://u{i}": UpstreamTotals(latency=histogram(s)) for i, s in enumerate((fast, slow))}
    return Timings(upstreams=upstreams)


def lacking_generate(status: Status, *numbers: int) -> Status:
    upstreams = [
        msgspec.structs.replace(upstream, lacks_generate=number in numbers)
        for number, upstream in enumerate(status.upstreams)
    ]
    return msgspec.structs.replace(status, upstreams=tuple(upstreams))


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

    def test_adds_what_no_worker_reported(self) -> None:
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

    def test_tells_which_upstream_is_slow(self) -> None:
        fast, slow = report.status(replace(VIEW, last_minute=timings(fast=0.1, slow=5.0)))["upstreams"]
        assert fast["latency_s"]["count"] == slow["latency_s"]["count"] == 1
        assert fast["latency_s"]["p99"] < 0.2 < 2 < slow["latency_s"]["p50"]
        assert fast["queue_s"] == {"count": 0, "p50": None, "p99": None}
        assert (fast["attempts"], fast["failed_attempts"]) == (6, 2)

    def test_what_nobody_has_fetched(self) -> None:
        assert report.status(VIEW)["undelivered"] == {"results": 2, "bytes": 200}
        assert report.undelivered({}) == {"results": 0, "bytes": 0}
        assert (
            report.undelivered({"completed": 5, "delivered": 1, "acknowledged": 5, "result_bytes": 50})["results"] == 0
        )

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
            ({"slots": (slot_view(0, worker_status("resting")),)}, ["no upstream is up"]),
            ({"slots": (slot_view(0, worker_status("unknown")),)}, []),
            ({"slots": (slot_view(0, worker_status("up"), "starting"),)}, ["no worker is ready"]),
            ({"slots": (slot_view(0, None),)}, ["no worker is ready"]),
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

    def test_an_upstream_without_generations_is_a_warning_that_says_what_to_do(self) -> None:
        """Told once, whichever workers have found it out; not of one that is off the list."""
        finds = [lacking_generate(worker_status("up", "leaving", "up"), *which) for which in ((0, 1), (0,), ())]
        slots = tuple(slot_view(number, status) for number, status in enumerate(finds))
        view = replace(VIEW, slots=slots, logprobs_scale={})
        ready, body = report.readiness(view)
        assert ready
        assert body["warnings"] == report.status(view)["warnings"] == [f"http://u0: {NO_GENERATE}"]
        assert "--enable-scale-out" in NO_GENERATE

    def test_a_model_that_no_upstream_lists_is_a_warning(self) -> None:
        finds = [msgspec.structs.replace(worker_status("up"), missing_models=("mine=c",)) for _ in range(2)]
        slots = tuple(slot_view(number, status) for number, status in enumerate(finds))
        ready, body = report.readiness(replace(VIEW, slots=slots, logprobs_scale={}))
        assert ready
        assert [warning.partition(",")[0] for warning in body["warnings"]] == ["--model mine=c: no upstream lists it"]


class TestPage:
    @staticmethod
    async def get(path: str, key: bytes = b"", method: str = "GET") -> tuple[int, dict[str, str], str]:
        """Send a request, without the admin key unless it is given."""
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": b"",
            "headers": [(b"x-admin-key", key)],
        }
        served = admin_app(None, "key")  # type: ignore[arg-type] # nothing is asked of the supervisor
        await served(scope, None, send)  # type: ignore[arg-type] # nor of the body
        headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return sent[0]["status"], headers, b"".join(message.get("body", b"") for message in sent).decode()

    @pytest.mark.parametrize("path", page.PAGES)
    async def test_is_open_and_takes_nothing_from_elsewhere(self, path: str) -> None:
        status, headers, body = await self.get(path)
        assert status == 200
        assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
        assert set(re.findall(r"https?://[^\s\"']+", body)) <= {"http://www.w3.org/2000/svg"}
        named = re.findall(r'(?:src|href)="([^"]+)"', body)
        assert all(f"/{name}" in page.PAGES or name == "data:," for name in named)

    @pytest.mark.parametrize(
        ("method", "path", "status", "detail"),
        [("GET", "/nope", 404, "there is no such path"), ("POST", "/status", 405, "this method is not allowed here")],
    )
    async def test_a_refusal_has_the_form_of_every_other_error(
        self, method: str, path: str, status: int, detail: str
    ) -> None:
        code, headers, body = await self.get(path, b"key", method)
        assert (code, json.loads(body)) == (status, {"detail": detail})
        assert ("allow" in headers) == (status == 405)

    async def test_what_it_shows_is_not(self) -> None:
        status, _, _ = await self.get("/status")
        assert status == 401

    def test_never_makes_markup_of_names(self) -> None:
        script = (Path(page.__file__).parent / "dashboard" / "dashboard.js").read_text()
        for door in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert door not in script

    def test_asks_for_fields_that_status_has(self) -> None:
        script = (Path(page.__file__).parent / "dashboard" / "dashboard.js").read_text()
        body = report.status(VIEW)
        asked = set(re.findall(r"\bredis\.(\w+)", script))
        assert asked
        assert asked <= set(body["redis"])
        each = set(re.findall(r"\beach\.(\w+)", script))
        assert each <= {*body, *body["workers"][0], *body["upstreams"][0], *body["keys"][0]}


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
        "warning: http://u0: sampled logprobs",
    ):
        assert expected in text
