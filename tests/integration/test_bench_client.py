"""The load client against a stub of the Tinker API: every habit of the SDK that a gateway can tell from outside."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import uvloop
from aiohttp import web

from gateway.bench.load import client as client_module
from gateway.bench.load.client import SdkClient, SetupFailed
from gateway.bench.load.pacing import MAX_SUBMITS
from gateway.bench.load.tally import LoadTally
from gateway.bench.load.transport import parse_address
from gateway.bench.load.workload import Workload
from shared.clock import SystemClock
from tests.integration.bench_stub import MODEL, Fault, Stub, StubVerifier, running

if TYPE_CHECKING:
    from collections.abc import Iterator

SEED = 20_240_607


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Back-offs are noted, not waited for; everything else that sleeps goes on sleeping."""
    waited: list[float] = []
    really = asyncio.sleep

    async def sleep(delay_s: float, *rest: Any) -> None:
        if 0 < delay_s < client_module.HEARTBEAT_S:
            waited.append(delay_s)
            delay_s = 0
        await really(delay_s, *rest)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    yield waited


async def load(
    stub: Stub,
    samples: int = 8,
    *,
    concurrency: int | None = None,
    source_ip: str | None = None,
    heartbeat_s: float = 60.0,
    **trouble: Any,
) -> tuple[LoadTally, SdkClient]:
    async with running(stub) as url:
        tally = LoadTally()
        workload = Workload(seed=SEED, model=MODEL, prompt_tokens=16, trouble_within_s=0.05, **trouble)
        client = SdkClient(
            parse_address(url, source_ip),
            "tml-test",
            workload,
            StubVerifier(),
            tally,
            SystemClock(),
            heartbeat_s=heartbeat_s,
        )
        try:
            await client.open()
            await client.run(iter(range(samples)), concurrency or samples)
        finally:
            client.close()
        return tally, client


async def test_every_sample_comes_back_checked() -> None:
    tally, client = await load(Stub(), 50)
    assert (tally.completed, tally.failed, tally.wrong, tally.resubmitted) == (50, 0, 0, 0)
    assert len(tally.latency_s) == len(tally.submit_s) == 50
    assert not client.uses_session_poll


def test_the_same_on_the_loop_that_client_processes_run_on() -> None:
    tally, _ = uvloop.run(load(Stub(), 50, source_ip="127.0.1.9", abandon_polls=0.5, duplicates=0.5))
    assert (tally.completed, tally.failed) == (50, 0)


async def test_never_more_than_four_hundred_submissions_are_open() -> None:
    stub = Stub()
    await load(stub, 1_000)
    assert 0 < stub.peak_asamples <= MAX_SUBMITS


async def test_connections_are_churned_as_the_sdk_does() -> None:
    """Two idle connections are kept per client object of 50: a burst opens nearly one per request."""
    stub = Stub()
    stub.ready.clear()
    stub.on("retrieve_future", 300, stub.ready.set)
    tally, client = await load(stub, 300)
    assert tally.completed == 300
    assert client.connections_opened > 300


async def test_the_client_comes_from_the_address_it_is_given() -> None:
    stub = Stub()
    await load(stub, 4, source_ip="127.0.1.9")
    assert stub.sources == {"127.0.1.9"}


async def test_a_lost_asample_reply_is_asked_for_again_under_the_same_seq_id() -> None:
    """A6, from the client's side."""
    stub = Stub()
    stub.faults["asample"].append(Fault(0, after=True))
    tally, _ = await load(stub, 1)
    assert tally.completed == 1
    assert stub.submissions == {0: 2}


async def test_repeated_and_lost_submissions_are_made_on_purpose() -> None:
    """A6: half of them on two connections at once, half after a reply that nobody read."""
    stub = Stub()
    tally, _ = await load(stub, 40, duplicates=1.0)
    assert tally.completed == 40
    assert tally.duplicates == 40
    assert set(stub.submissions.values()) <= {1, 2}
    assert sum(stub.submissions.values()) > 50


async def test_a_duplicate_that_is_promised_something_else_is_wrong() -> None:
    class Forgetful(Stub):
        async def _asample(self, body: dict[str, Any]) -> Any:
            promise = json.loads((await super()._asample(body)).text or "")
            promise["sample_sequence_ids"] = [f"made up {self.submissions.total()}"]
            return web.json_response(promise)

    tally, _ = await load(Forgetful(), 16, concurrency=1, duplicates=1.0)
    assert "duplicate promised another sample" in tally.failures
    assert tally.wrong >= 1


async def test_a_promise_that_is_gone_is_submitted_again_under_a_new_seq_id(no_waiting: list[float]) -> None:
    stub = Stub()
    stub.faults["retrieve_future"] += [Fault(410), Fault(410)]
    tally, _ = await load(stub, 1)
    assert (tally.completed, tally.resubmitted) == (1, 2)
    assert stub.submissions == {0: 1, 1: 1, 2: 1}
    assert 0.375 <= no_waiting[0] <= 0.625 and 0.75 <= no_waiting[1] <= 1.25


async def test_back_pressure_pauses_the_process_and_keeps_the_seq_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "backpressure_pause_s", lambda prompt_tokens: 0.05)
    stub = Stub()
    stub.faults["asample"].append(Fault(429))
    tally, _ = await load(stub, 3, concurrency=1)
    assert (tally.completed, tally.paused) == (3, 1)
    assert stub.submissions == {0: 1, 1: 1, 2: 1}
    assert stub.requests["asample"] == 4


@pytest.mark.parametrize("status", [408, 500, 503, 429, 0, 402, 400])
async def test_a_poll_that_may_be_repeated_is_repeated(status: int) -> None:
    stub = Stub()
    stub.faults["retrieve_future"].append(Fault(status))
    tally, _ = await load(stub, 1)
    assert (tally.completed, tally.polls) == (1, 2)


@pytest.mark.parametrize(
    ("path", "fault", "kind"),
    [
        ("asample", Fault(404), "asample 404"),
        ("asample", Fault(200, b"[]"), "promise malformed"),
        ("retrieve_future", Fault(404), "retrieve 404"),
        ("retrieve_future", Fault(409), "retrieve 409"),
        ("retrieve_future", Fault(200, b'{"error":"no","category":"server"}'), "error, category server"),
        ("retrieve_future", Fault(200, b"<html>"), "result malformed"),
        ("retrieve_future", Fault(200, b'{"type":"sample"}'), "result malformed"),
    ],
)
async def test_what_the_user_would_see_as_an_error_is_a_failure(path: str, fault: Fault, kind: str) -> None:
    stub = Stub()
    stub.faults[path].append(fault)
    tally, _ = await load(stub, 2, concurrency=1)
    assert (tally.completed, tally.failed) == (1, 1)
    assert tally.failures == {kind: 1}


async def test_metadata_first_is_taken_once() -> None:
    stub = Stub()
    stub.faults["retrieve_future"].append(Fault(200, b'{"status":"complete_metadata","response_payload_size":70000}'))
    tally, _ = await load(stub, 1)
    assert tally.completed == 1
    stub = Stub()
    stub.faults["retrieve_future"] += [Fault(200, b'{"status":"complete_metadata"}')] * 2
    tally, _ = await load(stub, 1)
    assert tally.failures == {"result malformed": 1}


async def test_somebody_elses_result_is_wrong() -> None:
    class Confused(Stub):
        async def _retrieve(self, body: dict[str, Any]) -> Any:
            self.results[body["request_id"]] = b"somebody else's"
            return await super()._retrieve(body)

    tally, _ = await load(Confused(), 3)
    assert (tally.completed, tally.failed, tally.wrong) == (0, 3, 3)


async def test_abandoned_polls_are_polled_again() -> None:
    """A2, from the client's side: results are there once each sample is polled for the fourth time."""

    class Slow(Stub):
        def __init__(self) -> None:
            super().__init__()
            self.polls: Counter[str] = Counter()

        async def _retrieve(self, body: dict[str, Any]) -> Any:
            self.polls[body["request_id"]] += 1
            if sum(count > 3 for count in self.polls.values()) == 20:
                self.ready.set()
            return await super()._retrieve(body)

    stub = Slow()
    stub.ready.clear()
    tally, _ = await load(stub, 20, abandon_polls=1.0)
    assert tally.completed == 20
    assert tally.abandoned_polls == 60


async def test_cancelled_samples_are_told_to_the_gateway_and_not_waited_for() -> None:
    stub = Stub()
    stub.ready.clear()
    tally, _ = await load(stub, 10, cancel=1.0)
    assert (tally.completed, tally.failed, tally.cancelled) == (0, 0, 10)
    assert len(set(stub.cancelled)) == 10


async def test_the_session_poll_is_used_when_the_gateway_offers_it() -> None:
    stub = Stub()
    stub.session_poll = True
    tally, client = await load(stub, 60)
    assert client.uses_session_poll
    assert (tally.completed, tally.polls) == (60, 60)
    assert tally.session_polls < 60
    assert sorted(set(stub.acknowledged)) == sorted(stub.order)
    assert stub.ack_timeouts[-1] == 0.0


@pytest.mark.parametrize("status", [0, 408, 429, 500, 400])
async def test_a_session_poll_that_fails_is_repeated_after_a_second(status: int, no_waiting: list[float]) -> None:
    stub = Stub()
    stub.session_poll = True
    stub.faults["retrieve_futures"].append(Fault(status))
    tally, _ = await load(stub, 5)
    assert tally.completed == 5
    assert no_waiting == [1.0]


@pytest.mark.parametrize(
    "fault", [Fault(404), Fault(410), Fault(200, b'{"cursor":1}'), Fault(200, b'{"completions":[{}],"cursor":1}')]
)
async def test_a_session_poll_that_ends_takes_every_sample_with_it(fault: Fault) -> None:
    stub = Stub()
    stub.session_poll = True
    stub.faults["retrieve_futures"].append(fault)
    tally, _ = await load(stub, 5, concurrency=2)
    assert (tally.completed, tally.failed) == (0, 5)


async def test_a_promise_gone_under_the_session_poll_is_not_acknowledged() -> None:
    stub = Stub()
    stub.session_poll = True
    stub.faults["retrieve_future"].append(Fault(410))
    tally, _ = await load(stub, 1)
    assert (tally.completed, tally.resubmitted) == (1, 1)
    assert set(stub.acknowledged) == {stub.order[1]}


async def test_heartbeats_are_sent_and_timed_while_samples_are_waited_for() -> None:
    """A1, from the client's side."""
    stub = Stub()
    stub.ready.clear()
    stub.faults["session_heartbeat"].append(Fault(500))
    stub.on("session_heartbeat", 3, stub.ready.set)
    tally, _ = await load(stub, 2, heartbeat_s=0.01)
    assert tally.completed == 2
    assert tally.heartbeats >= 2
    assert tally.heartbeats_failed == 1
    assert tally.heartbeat_max_s > 0


async def test_a_gateway_that_gives_no_session_is_told_in_a_sentence() -> None:
    stub = Stub()
    stub.faults["create_session"].append(Fault(401))
    with pytest.raises(SetupFailed, match=r"create_session with 401.*scripted"):
        await load(stub, 1)


async def test_set_up_is_tried_again_while_the_gateway_starts() -> None:
    stub = Stub()
    stub.faults["client/config"] += [Fault(503), Fault(0)]
    assert (await load(stub, 1))[0].completed == 1
