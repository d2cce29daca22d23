"""An upstream that repeats a prompt in its errors. Only the client whose prompt it is sees it."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Final

import msgspec
import pytest

from shared.core.faults import Fault
from shared.core.upstream_protocol import ClientChoice
from shared.log import JsonFormatter, TextFormatter
from tests.integration.passthrough.passage import asking, body_of, openai_passage, training_passage
from tests.integration.passthrough.raw_upstream import raw_upstream
from tests.integration.upstream.lines import line
from workers.upstream.upstream import UpstreamLog

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.integration.passthrough.raw_upstream import Exchange, RawUpstream

BAIT: Final = (31_101, 31_102, 31_103)
WORDS: Final = "the secret plan of Karla"
TRACES: Final = ("31101", "31103", "Karla", "secret")
# What the upstream sends around its error, which stands for {}.
REPLIES: Final = {
    **{
        str(status): b"HTTP/1.1 %d No\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n{}" % status
        for status in (200, 302, 400, 401, 404, 408, 413, 422, 429, 500, 502, 503)
    },
    "no HTTP": b"{}\r\n\r\n",
    "a bad header": b"HTTP/1.1 200 OK\r\n{}\r\n\r\n",
    "a bad length": b"HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n",
    "a bad chunk": b"HTTP/1.1 500 No\r\nTransfer-Encoding: chunked\r\n\r\n{}\r\n",
    "a body that is cut": b"HTTP/1.1 500 No\r\nContent-Length: 9999\r\n\r\n{}",
}


class Repeats:
    """Answer every request with its own body inside an error."""

    def __init__(self, reply: bytes) -> None:
        self._reply = reply

    async def __call__(self, exchange: Exchange) -> None:
        asked = (await exchange.whole_body()).decode()
        message = f"cannot read {asked!r} at all"
        error = json.dumps({"error": {"message": message, "type": f"No{WORDS}", "code": 500}}).encode()
        whole = self._reply.replace(b"{length}", str(len(error)).encode()).replace(b"{}", error)
        await exchange.say(whole)
        exchange.writer.close()


@pytest.fixture
async def upstream(request: pytest.FixtureRequest) -> AsyncIterator[RawUpstream]:
    async with raw_upstream() as upstream:
        yield upstream


def written(caplog: pytest.LogCaptureFixture) -> str:
    """All lines of the log, in both forms."""
    forms = (TextFormatter({}), JsonFormatter({}))
    return "\n".join(form.format(record) for record in caplog.records for form in forms)


@pytest.mark.parametrize("client", list(ClientChoice), ids=lambda choice: choice.value)
@pytest.mark.parametrize("name", REPLIES)
async def test_of_a_sample(
    upstream: RawUpstream, name: str, client: ClientChoice, caplog: pytest.LogCaptureFixture
) -> None:
    upstream.handler = Repeats(REPLIES[name])
    with caplog.at_level(logging.DEBUG):
        async with line(upstream.url, upstream_client=client) as made:
            fault = await made.ask(prompt=BAIT)
            if isinstance(fault, Fault):
                made.pool.failed(made.upstream, fault)
                made.pool.broke(made.upstream, fault.for_operators)
                UpstreamLog().look([made.upstream], 0.0)
                written(caplog).index(upstream.url)
                assert_clean(fault.for_operators)
                assert upstream.url not in fault.message and "0x" not in fault.message
            else:
                assert name == "200"
            assert_clean(written(caplog), str(msgspec.to_builtins(made.pool.statuses())), made.upstream.last_failure)


@pytest.mark.parametrize("name", REPLIES)
async def test_of_what_is_passed_to_vllm(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        async with openai_passage(upstream_wait_s=0.0) as passage:
            passage.first.handler = passage.second.handler = Repeats(REPLIES[name])
            body = json.dumps({"model": "sim/tiny", "prompt": f"{WORDS} 31101, 31103"}).encode()
            answered = await passage.ask(asking("POST", "/v1/completions", body=body))
            statuses = str(msgspec.to_builtins(passage.bench.pool.statuses()))
            assert_clean(written(caplog), statuses, *(one.last_failure for one in passage.bench.pool.up()))
            assert passage.first.url.encode() not in answered and b" 0x" not in answered


@pytest.mark.parametrize("name", REPLIES)
async def test_of_what_is_passed_to_the_trainer(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        async with training_passage() as passage:
            passage.upstream.handler = Repeats(REPLIES[name])
            body = json.dumps({"prompt": f"{WORDS} 31101, 31103"}).encode()
            answered = await passage.ask(asking("POST", "/api/v1/forward_backward", body=body))
            assert_clean(written(caplog))
            assert passage.upstream.url.encode() not in answered and b" 0x" not in answered


async def test_its_own_client_gets_all_of_it(upstream: RawUpstream) -> None:
    upstream.handler = Repeats(REPLIES["400"])
    async with line(upstream.url) as made:
        fault = await made.ask(prompt=BAIT)
        assert isinstance(fault, Fault)
        assert "31101" in fault.message
    async with openai_passage() as passage:
        passage.first.handler = passage.second.handler = Repeats(REPLIES["400"])
        body = json.dumps({"model": "sim/tiny", "prompt": WORDS}).encode()
        assert WORDS.encode() in body_of(await passage.ask(asking("POST", "/v1/completions", body=body)))


def assert_clean(*texts: str) -> None:
    for text in texts:
        for trace in TRACES:
            assert trace not in text, text
