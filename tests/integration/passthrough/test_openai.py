"""OpenAI's API over real sockets: names, keys, streams, limits, and what is sent again."""

from __future__ import annotations

import asyncio
import json
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

import pytest

from shared.core.callers import ApiKey, KeyLimits
from tests.integration.passthrough.passage import OpenAiPassage, asking, body_of, head_of, openai_passage
from tests.integration.passthrough.raw_upstream import IMPOSSIBLE, Exchange, reply, soon
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

KEY: Final = "tml-client"
MODEL: Final = "sim/tiny"
CHAT: Final = "/v1/chat/completions"
DONE: Final = json.dumps({"object": "chat.completion", "choices": [{"index": 0}]}).encode()
PATHS: Final = ("/v1/completions", CHAT)


def key(**limits: int) -> tuple[ApiKey, ...]:
    return (ApiKey("client", sha256(KEY.encode()).hexdigest(), KeyLimits(**limits)),)


@pytest.fixture
async def passage() -> AsyncIterator[OpenAiPassage]:
    async with openai_passage() as passage:
        yield passage


def chat(path: str = CHAT, *headers: str, **fields: Any) -> bytes:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "é 1.50"}], "temperature": 0.5} | fields
    return asking("POST", path, "Content-Type: application/json", *headers, body=json.dumps(body).encode())


def error_of(answered: bytes) -> tuple[int, dict[str, Any]]:
    error = json.loads(body_of(answered))["error"]
    assert error["message"] and error["type"]
    assert error["code"] == int(head_of(answered)[":status"])
    return error["code"], error


class Scripted:
    """Answers one after the other, the last one for ever."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.bodies: list[Any] = []

    async def __call__(self, exchange: Exchange) -> None:
        self.bodies.append(json.loads(await exchange.whole_body()))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if not answer:
            exchange.writer.transport.abort()
            return
        await exchange.say(answer)


@pytest.mark.parametrize("path", PATHS)
async def test_a_completion_passes_with_the_upstreams_name_of_the_model(passage: OpenAiPassage, path: str) -> None:
    scripted = passage.first.handler = Scripted(
        reply("200 OK", DONE, "Content-Type: application/json", "Set-Cookie: a=1")
    )
    answered = await passage.ask(chat(path, "Cookie: c", "Accept-Encoding: gzip", "X-Request-Id: r-1", n=2))
    assert (head_of(answered)[":status"], body_of(answered)) == ("200", DONE)
    assert "set-cookie" not in head_of(answered)
    (body,) = scripted.bodies
    assert body["messages"][0]["content"] == "é 1.50" and body["n"] == 2
    assert body["model"] == MODEL
    seen = passage.first.last
    assert seen.line == f"POST {path} HTTP/1.1"
    names = {name for name, _ in seen.headers}
    assert names == {"host", "content-type", "content-length", "x-request-id", "authorization"}
    # The operator's, not the client's.
    assert seen.header("authorization") == "Bearer engine-key"


async def test_an_adapter_is_named_by_its_path(passage: OpenAiPassage) -> None:
    scripted = passage.first.handler = Scripted(reply("200 OK", DONE))
    await passage.ask(chat(model="tinker://run-1/sampler_weights/3"))
    assert scripted.bodies[0]["model"] == "run-1"


async def test_events_are_passed_on_one_by_one(passage: OpenAiPassage) -> None:
    go_on = asyncio.Event()

    async def events(exchange: Exchange) -> None:
        await exchange.whole_body()
        await exchange.say(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        await exchange.say(b"9\r\ndata: 1\n\n\r\n")
        await go_on.wait()
        await exchange.say(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    passage.first.handler = events
    client = await passage.connect()
    await client.send(chat(stream=True))
    first = await client.read_until(b"data: 1\n\n\r\n")
    assert head_of(first)["content-type"] == "text/event-stream"
    assert passage.bench.dispatcher.quota.passed_in_flight == 1
    go_on.set()
    assert body_of(first + await soon(client.read_to_end())) == b"data: 1\n\ndata: [DONE]\n\n"
    client.close()
    assert passage.bench.dispatcher.quota.passed_in_flight == 0


@pytest.mark.parametrize("begun", [False, True])
async def test_a_client_that_leaves_closes_the_upstream_request(passage: OpenAiPassage, begun: bool) -> None:
    """D7"""

    async def wait(exchange: Exchange) -> None:
        await exchange.whole_body()
        if begun:
            await exchange.say(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n")
        await exchange.wait_closed()

    passage.first.handler = wait
    client = await passage.connect()
    await client.send(chat(stream=True))
    await until(lambda: passage.first.exchanges, "the upstream to be asked")
    if begun:
        await client.read_until(b"data: 1\n\n\r\n")
    client.close()
    await soon(passage.first.last.closed.wait())
    await until(lambda: passage.bench.dispatcher.quota.passed_in_flight == 0, "the request to be over")


async def test_a_stream_that_breaks_off_does_not_look_whole(passage: OpenAiPassage) -> None:
    async def cut(exchange: Exchange) -> None:
        await exchange.whole_body()
        await exchange.say(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n")
        exchange.writer.close()

    passage.first.handler = cut
    answered = await passage.ask(chat(stream=True))
    assert b"data: 1" in answered and not answered.endswith(b"0\r\n\r\n")
    assert len(passage.first.exchanges) == 1 and not passage.second.exchanges


async def test_what_was_never_executed_is_sent_again_and_elsewhere(passage: OpenAiPassage) -> None:
    await passage.first.stop()
    scripted = passage.second.handler = Scripted(
        reply("503 Busy"), reply("429 Busy", b"{}", "Retry-After: 1"), reply("200 OK", DONE)
    )
    assert body_of(await passage.ask(chat())) == DONE
    assert len(scripted.bodies) == 3
    assert scripted.bodies[0] == scripted.bodies[2]


async def test_an_upstream_that_takes_nothing_is_a_503_in_the_end(passage: OpenAiPassage) -> None:
    await passage.first.stop()
    await passage.second.stop()
    status, error = error_of(await passage.ask(chat()))
    assert (status, error["type"]) == (503, "server_error")
    assert "127.0.0.1" not in error["message"]


async def test_what_may_have_been_executed_is_not_sent_again(passage: OpenAiPassage) -> None:
    passage.first.handler = passage.second.handler = Scripted(b"")
    status, error = error_of(await passage.ask(chat()))
    assert (status, error["type"]) == (502, "server_error")
    assert len(passage.first.exchanges) + len(passage.second.exchanges) == 1


@pytest.mark.parametrize("what", IMPOSSIBLE)
async def test_a_reply_that_no_client_can_be_sent_is_a_502(passage: OpenAiPassage, what: str) -> None:
    scripted = passage.first.handler = Scripted(IMPOSSIBLE[what])
    assert error_of(await passage.ask(chat()))[0] == 502
    assert len(scripted.bodies) == 1


async def test_the_upstreams_own_refusal_is_the_clients_to_read(passage: OpenAiPassage) -> None:
    words = b'{"error":{"message":"too long","type":"BadRequestError","param":null,"code":400}}'
    passage.first.handler = Scripted(reply("400 Bad Request", words, "Content-Type: application/json"))
    answered = await passage.ask(chat())
    assert (head_of(answered)[":status"], body_of(answered)) == ("400", words)


@pytest.mark.parametrize("status", ["401 Unauthorized", "403 Forbidden", "307 Moved"])
async def test_what_is_between_us_and_the_upstream_is_no_business_of_the_client(
    passage: OpenAiPassage, status: str
) -> None:
    passage.first.handler = Scripted(reply(status, b"{}", "Location: http://inside/"))
    answered = await passage.ask(chat())
    assert error_of(answered)[0] == 502
    assert b"inside" not in answered


def told(passage: OpenAiPassage) -> dict[str, int]:
    """What is counted of attempts and replies, but for zeros."""
    counts = passage.bench.counters.snapshot()
    return {
        name: count for name, count in counts.items() if count and name.startswith(("attempts", "faults_", "http_"))
    }


@pytest.mark.parametrize(
    ("answer", "counts", "failures"),
    [
        (reply("200 OK", DONE), {}, 0),
        (reply("400 Bad Request", b'{"error":{}}'), {"faults_refused": 1, "http_client_errors": 1}, 0),
        (reply("403 Forbidden", b"{}"), {"faults_refused": 1, "http_server_errors": 1}, 1),
        (reply("500 Broken", b"{}"), {"faults_ambiguous": 1, "http_server_errors": 1}, 1),
        (b"", {"faults_interrupted": 1, "http_server_errors": 1}, 1),
    ],
)
async def test_attempts_failures_and_replies_are_counted_alike(
    passage: OpenAiPassage, answer: bytes, counts: dict[str, int], failures: int
) -> None:
    passage.first.handler = Scripted(answer)
    await passage.ask(chat())
    assert told(passage) == {"attempts": 1, "http_requests": 1} | counts
    first, _ = passage.bench.pool.statuses()
    assert (first.attempts, first.faults) == (1, failures)


async def test_each_attempt_counts_and_the_request_once(passage: OpenAiPassage) -> None:
    passage.first.handler = Scripted(reply("503 Busy"))
    passage.second.handler = Scripted(reply("429 Busy"), reply("200 OK", DONE))
    await passage.ask(chat())
    asked = len(passage.first.exchanges) + len(passage.second.exchanges)
    assert asked > 1
    assert told(passage) == {"attempts": asked, "faults_never_executed": asked - 1, "http_requests": 1}


async def test_a_reply_that_breaks_off_is_a_failed_attempt(passage: OpenAiPassage) -> None:
    async def cut(exchange: Exchange) -> None:
        await exchange.whole_body()
        await exchange.say(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n")
        exchange.writer.close()

    passage.first.handler = cut
    await passage.ask(chat(stream=True))
    assert told(passage) == {"attempts": 1, "faults_ambiguous": 1, "http_requests": 1, "http_server_errors": 1}
    assert passage.bench.pool.statuses()[0].faults == 1


@pytest.mark.parametrize(
    "sent",
    [
        asking("GET", CHAT),
        asking("POST", "/v1/embeddings", body=b"{}"),
        asking("GET", "/nowhere"),
        asking("GET", "/api/v1/asample"),
        asking("GET", "/api/v1/nowhere"),
    ],
)
async def test_what_no_route_takes_is_counted(passage: OpenAiPassage, sent: bytes) -> None:
    status = head_of(await passage.ask(sent))[":status"]
    kind = "http_server_errors" if status == "501" else "http_client_errors"
    assert status in ("404", "405", "501")
    assert told(passage) == {"http_requests": 1, kind: 1}


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (asking("POST", CHAT, body=b"{"), 400),
        (asking("POST", CHAT, body=b"[]"), 400),
        (asking("POST", CHAT, body=b'{"model":"\xff"}'), 400),
        (asking("POST", CHAT, body=b"{}"), 400),
        (asking("POST", CHAT, body=b'{"model":7}'), 400),
        (chat(model="other"), 404),
        (chat(n="two"), 400),
        (asking("POST", CHAT, "Content-Encoding: gzip", body=b"{}"), 415),
        (chat(prompt="x" * 4096), 413),
        (asking("GET", CHAT), 405),
        (asking("POST", "/v1/embeddings", body=b"{}"), 404),
        (asking("POST", "/v1/load_lora_adapter", body=b"{}"), 404),
        (asking("GET", "/v1/../metrics"), 404),
    ],
)
async def test_refusals_are_in_openais_form_and_reach_no_upstream(sent: bytes, status: int) -> None:
    async with openai_passage(max_body_bytes=2048) as passage:
        assert error_of(await passage.ask(sent))[0] == status
        assert not passage.first.exchanges and not passage.second.exchanges


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ((), 401),
        (("Authorization: Bearer tml-wrong",), 401),
        (("Authorization: Basic tml-client",), 401),
        ((f"Authorization: Bearer {KEY}",), 200),
        ((f"Authorization: bearer {KEY}",), 200),
        ((f"X-API-Key: {KEY}",), 200),
    ],
)
async def test_the_same_keys_open_it(headers: tuple[str, ...], status: int) -> None:
    async with openai_passage(api_keys=key()) as passage:
        passage.first.handler = Scripted(reply("200 OK", DONE))
        answered = await passage.ask(chat(CHAT, *headers))
        assert head_of(answered)[":status"] == str(status)
        assert len(passage.first.exchanges) == (status == 200)
        if status == 401:
            assert error_of(answered)[1]["type"] == "authentication_error"


async def test_requests_count_against_the_limit_of_samples() -> None:
    async with openai_passage(max_in_flight=1) as passage:
        go_on = asyncio.Event()

        async def wait(exchange: Exchange) -> None:
            await exchange.whole_body()
            await go_on.wait()
            await exchange.say(reply("200 OK", DONE))

        passage.first.handler = wait
        asked = asyncio.create_task(passage.ask(chat()))
        await until(lambda: passage.first.exchanges, "the upstream to be asked")
        assert error_of(await passage.ask(chat()))[1]["type"] == "rate_limit_error"
        assert (await passage.bench.asample()).status == 429
        idle = asyncio.create_task(passage.bench.dispatcher.wait_idle())
        go_on.set()
        assert body_of(await asked) == DONE
        await soon(idle)


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"max_tokens": 8}, "200"),
        ({"max_tokens": 8, "n": 2}, "403"),
        ({"max_completion_tokens": 9}, "403"),
        ({"max_tokens": 8, "prompt": ["a", "b"]}, "403"),
        ({"max_tokens": 8, "prompt": [1, 2, 3]}, "200"),
        ({}, "403"),
    ],
)
async def test_a_key_may_not_ask_for_more_at_once_than_for_samples(fields: dict[str, Any], status: str) -> None:
    async with openai_passage(api_keys=key(max_request_tokens=8)) as passage:
        passage.first.handler = Scripted(reply("200 OK", DONE))
        answered = await passage.ask(chat("/v1/completions", f"X-API-Key: {KEY}", **fields))
        assert head_of(answered)[":status"] == status


async def test_the_models_are_those_that_can_be_sampled(passage: OpenAiPassage) -> None:
    listed = json.loads(body_of(await passage.ask(asking("GET", "/v1/models"))))
    assert [(card["id"], card["max_model_len"]) for card in listed["data"]] == [(MODEL, 64)]
    assert passage.first.exchanges == []
