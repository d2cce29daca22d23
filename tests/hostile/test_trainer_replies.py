"""A training server whose replies have a strange framing or status: the client gets one whole reply, whatever it is."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests.integration.passthrough.passage import asking, body_of, head_of, training_passage

if TYPE_CHECKING:
    from tests.integration.passthrough.raw_upstream import Exchange


async def answers(exchange: Exchange, reply: bytes) -> None:
    await exchange.whole_body()
    await exchange.say(reply)


PATHS = {
    "streamed": ("POST", "/api/v1/forward_backward", b"{}"),
    "read whole": ("POST", "/api/v1/create_session", b"{}"),
    "a poll": ("POST", "/api/v1/retrieve_future", b'{"request_id":"trainer-1"}'),
    "a GET": ("GET", "/api/v1/training_runs", b""),
}


@pytest.mark.parametrize("way", PATHS)
@pytest.mark.parametrize("status", [204, 304])
@pytest.mark.parametrize("length", ["Content-Length: 5\r\n", "Content-Length: 0\r\n", ""], ids=["5", "0", "none"])
async def test_a_reply_without_a_body_may_name_a_length(
    way: str, status: int, length: str, caplog: pytest.LogCaptureFixture
) -> None:
    method, path, body = PATHS[way]
    async with training_passage() as passage:
        passage.upstream.handler = partial(answers, reply=f"HTTP/1.1 {status} X\r\n{length}ETag: e\r\n\r\n".encode())
        for _ in range(2):
            answered = await passage.ask(asking(method, path, body=body))
            if way == "read whole" and status == 204:
                # A session without an id is of no use to anybody.
                assert head_of(answered)[":status"] == "502"
                continue
            assert (head_of(answered)[":status"], body_of(answered)) == (str(status), b"")
            assert status != 204 or "content-length" not in head_of(answered)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("way", PATHS)
@pytest.mark.parametrize("status", [101, 600, 999])
async def test_a_status_that_answers_no_request_is_a_502(
    way: str, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A 101 that nobody asked for would make of the client's connection one of another protocol."""
    method, path, body = PATHS[way]
    reply = f"HTTP/1.1 {status} X\r\nUpgrade: x\r\nConnection: upgrade\r\nContent-Length: 0\r\n\r\n".encode()
    async with training_passage() as passage:
        passage.upstream.handler = partial(answers, reply=reply)
        answered = await passage.ask(asking(method, path, body=body))
        # The SDK repeats a poll that gets a 5xx without any pause.
        wanted = "429" if way == "a poll" else "502"
        assert head_of(answered)[":status"] == wanted
        assert answered.count(b"HTTP/1.1") == 1
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
