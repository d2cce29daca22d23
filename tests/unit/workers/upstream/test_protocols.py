"""How each upstream is asked for samples, and how that is found out."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any, Final

import pytest

from shared.clock import ManualClock
from shared.core.errors import BadRequest
from shared.core.faults import BreakKind, Fault, FaultClass, classify_break, classify_reply
from shared.core.logprobs_check import PROBE_REQUEST_ID
from shared.core.model import Category, SampleSpec, SamplingParams
from shared.core.upstream_protocol import NO_GENERATE, ProtocolChoice, UpstreamProtocol
from workers.upstream.catalogue import Catalogue
from workers.upstream.pool import UpstreamPool

if TYPE_CHECKING:
    from workers.upstream.upstream import Upstream

COMPLETIONS, GENERATE = UpstreamProtocol.COMPLETIONS, UpstreamProtocol.GENERATE
REFUSED: Final = classify_break(BreakKind.CONNECT_REFUSED, "http://a")
LISTING: Final = json.dumps({"data": [{"id": "tiny", "max_model_len": 64}]}).encode()
LONG_STOP: Final = SampleSpec(b"1", 1, 1, SamplingParams(stop=("a", "b", "c", "d", "e")))
SHORT_STOP: Final = SampleSpec(b"1", 1, 1, SamplingParams(stop=("a",)))


class FakeForwarder:
    """Upstreams that list a model, and answer to a generation of nothing with the status that they were told."""

    def __init__(self) -> None:
        self.statuses: dict[str, int | Fault] = {}
        self.gone: set[str] = set()
        self.asked: list[tuple[str, bytes, str | None]] = []

    async def get(self, upstream: Upstream, url: object, timeout_s: float) -> bytes | Fault:
        return REFUSED if upstream.url in self.gone else LISTING

    async def ask(
        self, upstream: Upstream, url: object, body: bytes, timeout_s: float, request_id: str | None = None
    ) -> tuple[int, bytes] | Fault:
        self.asked.append((str(url), body, request_id))
        status = self.statuses.get(upstream.url, 404)
        return status if isinstance(status, Fault) else (status, b"{}")


class Bench:
    def __init__(self, choice: ProtocolChoice, *urls: str) -> None:
        self.forwarder = FakeForwarder()
        self.clock = ManualClock()
        forwarder: Any = self.forwarder
        self.pool = UpstreamPool(urls or ("http://a",), forwarder, Catalogue((), ""), self.clock, protocol=choice)

    @property
    def upstream(self) -> Upstream:
        return self.pool.choose("tiny")


@pytest.mark.parametrize(
    ("choice", "protocol"), [(ProtocolChoice.COMPLETIONS, COMPLETIONS), (ProtocolChoice.GENERATE, GENERATE)]
)
async def test_what_was_chosen_is_not_asked_for(choice: ProtocolChoice, protocol: UpstreamProtocol) -> None:
    bench = Bench(choice)
    await bench.pool.learn_models()
    bench.pool.broke(bench.upstream)
    await bench.pool.learn_models()
    assert (bench.upstream.protocol, bench.upstream.protocol_known) == (protocol, True)
    assert not bench.forwarder.asked


@pytest.mark.parametrize(
    ("status", "protocol", "known"),
    [(400, GENERATE, True), (404, COMPLETIONS, True), (403, COMPLETIONS, True), (503, COMPLETIONS, False)],
)
async def test_auto_asks_each_upstream(status: int, protocol: UpstreamProtocol, known: bool) -> None:
    bench = Bench(ProtocolChoice.AUTO)
    bench.forwarder.statuses["http://a"] = status
    assert not bench.upstream.protocol_known
    await bench.pool.learn_models()
    assert (bench.upstream.protocol, bench.upstream.protocol_known) == (protocol, known)
    assert bench.forwarder.asked == [("http://a/inference/v1/generate", b"{}", PROBE_REQUEST_ID)]


async def test_auto_asks_once_when_it_is_answered_and_again_when_not() -> None:
    bench = Bench(ProtocolChoice.AUTO)
    bench.forwarder.statuses["http://a"] = REFUSED
    await bench.pool.learn_models()
    bench.forwarder.statuses["http://a"] = 400
    await bench.pool.learn_models()
    await bench.pool.learn_models()
    await bench.pool.learn_models()
    assert len(bench.forwarder.asked) == 2
    assert bench.upstream.protocol is GENERATE


async def test_an_upstream_that_comes_back_is_asked_again() -> None:
    """Another vLLM may have been started in its place: its rest does not end before it has told."""
    bench = Bench(ProtocolChoice.AUTO)
    bench.forwarder.statuses["http://a"] = 400
    await bench.pool.learn_models()
    bench.forwarder.gone.add("http://a")
    bench.pool.broke(bench.upstream, "reset")
    await bench.pool.probe()
    assert (bench.upstream.protocol, bench.upstream.protocol_known) == (GENERATE, False)
    assert len(bench.forwarder.asked) == 1
    bench.forwarder.gone.clear()
    bench.forwarder.statuses["http://a"] = 403
    bench.clock.advance(60.0)
    await bench.pool.probe()
    assert (bench.upstream.protocol, bench.upstream.protocol_known) == (COMPLETIONS, True)
    assert not bench.upstream.on_probation


async def test_an_upstream_that_is_new_on_the_list_is_asked() -> None:
    bench = Bench(ProtocolChoice.AUTO)
    bench.forwarder.statuses = {"http://a": 404, "http://b": 400}
    await bench.pool.learn_models()
    bench.pool.replace(["http://b", "http://a"])
    await bench.pool.learn_models()
    assert [url for url, _, _ in bench.forwarder.asked] == [f"http://{name}/inference/v1/generate" for name in "ab"]
    assert {one.url: one.protocol for one in bench.pool.statuses()} == {
        "http://a": "completions",
        "http://b": "generate",
    }


async def test_status_tells_no_protocol_that_is_not_known() -> None:
    bench = Bench(ProtocolChoice.AUTO)
    assert [one.protocol for one in bench.pool.statuses()] == [None]


# -- what only one of the two can be asked ----------------------------------------------------------------------------


async def test_a_long_stop_list_goes_where_it_can() -> None:
    bench = Bench(ProtocolChoice.AUTO, "http://a", "http://b", "http://c")
    bench.forwarder.statuses = {"http://a": 404, "http://b": 400, "http://c": 404}
    await bench.pool.learn_models()
    bench.pool.require_protocol(LONG_STOP, "tiny")
    chosen = {bench.pool.choose("tiny", None, f"session-{n}", generates=True).url for n in range(50)}
    assert chosen == {"http://b"}
    assert len({bench.pool.choose("tiny", None, f"session-{n}").url for n in range(50)}) == 3


@pytest.mark.parametrize("choice", ProtocolChoice)
async def test_a_long_stop_list_that_nobody_takes_is_refused(choice: ProtocolChoice) -> None:
    bench = Bench(choice)
    await bench.pool.learn_models()
    bench.pool.require_protocol(SHORT_STOP, "tiny")
    if choice is ProtocolChoice.GENERATE:
        bench.pool.require_protocol(LONG_STOP, "tiny")
        return
    with pytest.raises(BadRequest, match=r"stop has 5 strings, .* at most 4: ") as caught:
        bench.pool.require_protocol(LONG_STOP, "tiny")
    named = "--upstream-protocol" if choice is ProtocolChoice.COMPLETIONS else "--enable-scale-out"
    assert named in str(caught.value)


async def test_before_an_upstream_has_told_a_long_stop_list_waits() -> None:
    bench = Bench(ProtocolChoice.AUTO)
    bench.forwarder.statuses["http://a"] = 503
    await bench.pool.learn_models()
    bench.pool.require_protocol(LONG_STOP, "tiny")
    fault = bench.pool.protocols.unable(bench.upstream, "stop is long")
    assert fault is not None
    assert fault.kind is FaultClass.NEVER_EXECUTED
    bench.forwarder.statuses["http://a"] = 404
    await bench.pool.learn_models()
    fault = bench.pool.protocols.unable(bench.upstream, "stop is long")
    assert fault is not None
    assert (fault.kind, fault.category) == (FaultClass.REFUSED, Category.USER)


@pytest.mark.parametrize("status", [403, 404, 405])
async def test_an_endpoint_that_is_not_there(status: int) -> None:
    """With `auto` the sample was never executed, and goes to the other endpoint; else the operator is told."""
    fault = classify_reply(status, b"", {}, GENERATE)
    assert fault.generate_missing
    chosen = Bench(ProtocolChoice.GENERATE)
    assert chosen.pool.protocols.without_generate(chosen.upstream, fault) is fault
    assert (fault.kind, fault.category) == (FaultClass.REFUSED, Category.SERVER)
    assert "--enable-scale-out" in fault.message
    found = Bench(ProtocolChoice.AUTO)
    found.forwarder.statuses["http://a"] = 400
    await found.pool.learn_models()
    told = found.pool.protocols.without_generate(found.upstream, fault)
    assert told.kind is FaultClass.NEVER_EXECUTED
    assert (found.upstream.protocol, found.upstream.protocol_known) == (COMPLETIONS, True)


async def test_that_generations_are_not_there_is_told_until_they_are(caplog: pytest.LogCaptureFixture) -> None:
    """A line per upstream in half a minute, and the status of those that a sample has met."""
    bench = Bench(ProtocolChoice.GENERATE, "http://a", "http://b")
    first = bench.upstream
    second = bench.pool.choose("tiny", avoid=first)
    fault = classify_reply(403, b"", {}, GENERATE)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            bench.pool.protocols.without_generate(first, fault)
        bench.clock.advance(60.0)
        bench.pool.protocols.without_generate(first, fault)
    told = [vars(record) for record in caplog.records if record.message == NO_GENERATE]
    assert [(line["upstream"], line["error"], line["samples_not_told"]) for line in told] == [
        (first.url, fault.message, 0),
        (first.url, fault.message, 2),
    ]
    for status, lacks in ((403, True), (503, True), (400, False)):
        bench.forwarder.statuses[first.url] = status
        await bench.pool.learn_models()
        assert {one.url: one.lacks_generate for one in bench.pool.statuses()} == {first.url: lacks, second.url: False}
    await bench.pool.learn_models()
    assert len(bench.forwarder.asked) == 3
    assert [one.protocol for one in bench.pool.statuses()] == ["generate", "generate"]


async def test_auto_does_not_complain_of_generations_that_are_not_there(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(ProtocolChoice.AUTO)
    bench.pool.protocols.without_generate(bench.upstream, classify_reply(404, b"", {}, GENERATE))
    assert not caplog.records
    assert not bench.upstream.lacks_generate
