"""An upstream, or a proxy before it, that sends more replies than it was asked for. Nobody gets another's.

The extra reply comes in the same read as the right one, in the same read but for its end, while the connection is idle,
or just after the next request was sent. The last cannot be told by the connection, and is told by what the reply says.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pytest

from shared.core.lifecycle import State
from shared.core.upstream_protocol import ClientChoice, ProtocolChoice
from shared.wire.sdk import result as proto
from tests.integration.passthrough.passage import asking, body_of, openai_passage, training_passage
from tests.integration.upstream.lines import line
from tests.worker_bench import spec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from shared.core.model import SampleSpec
    from tests.integration.passthrough.passage import Edge
    from tests.integration.upstream.lines import Line

TIMES: Final = 20
# All but the last half of an extra reply.
CUT: Final = 30


class TwoReplies:
    """Answers each request with its own reply, and once more as `when` says; `connections` counts what was opened."""

    def __init__(self, when: str) -> None:
        self._when = when
        self.connections = 0
        self.extras = 0
        self._then: Callable[[], None] = nothing

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        stale = b""
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
                right = self.reply(head.decode(), await reader.readexactly(length))
                if stale:
                    writer.write(stale)
                    await writer.drain()
                    stale = b""
                stale = await self._answer(writer, right)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def send_late(self) -> None:
        self._then()
        self._then = nothing

    async def _answer(self, writer: asyncio.StreamWriter, right: bytes) -> bytes:
        """Return what is to be sent when the next request has come."""
        self.extras += 1
        head, _, body = right.partition(b"\r\n\r\n")
        match self._when:
            case "together":
                writer.write(right + right)
            case "in its last read":
                # The connection is given back while the parser still has bytes to parse.
                writer.write(head + b"\r\n\r\n")
                await writer.drain()
                await several_turns()
                writer.write(body + right)
            case "begun":
                writer.write(right + right[:-CUT])
            case "later":
                writer.write(right)
                self._then = partial(writer.write, right)
            case "after the next request":
                writer.write(right)
                return right
            case _:
                writer.write(right)
        await writer.drain()
        return b""

    def reply(self, head: str, body: bytes) -> bytes:
        """The request's own words: whoever gets them must have sent them."""
        return whole(json.dumps({"echo": body.decode()}).encode())


class TwoCompletions(TwoReplies):
    """A vLLM behind such a proxy; a router in between may write ids of its own."""

    def __init__(self, when: str, *, rewrites_ids: bool = False, protocol: ProtocolChoice) -> None:
        super().__init__(when)
        self._rewrites_ids = rewrites_ids
        self._generates = protocol is ProtocolChoice.GENERATE

    def reply(self, head: str, body: bytes) -> bytes:
        asked = json.loads(body)
        name = head[head.lower().index("x-request-id: ") + 14 :].partition("\r\n")[0]
        name = f"router-{self.extras}" if self._rewrites_ids else name
        prompt = asked["token_ids" if self._generates else "prompt"]
        usage = {"prompt_tokens": len(prompt)}
        tokens = [prompt[-1]]
        if self._generates:
            logprobs: Any = {"content": [{"token_id": tokens[0], "logprob": -1.0, "top_logprobs": []}]}
            named = {"request_id": f"generate-tokens-{name}"}
        else:
            logprobs = {"text_offset": [0], "token_logprobs": [-1.0], "tokens": ["x"], "top_logprobs": [{"x": -1.0}]}
            named = {"id": f"cmpl-{name}"}
        choice = {"index": 0, "text": "x", "logprobs": logprobs, "finish_reason": "length", "token_ids": tokens}
        if not self._generates:
            choice["prompt_token_ids"] = prompt
        document = {**named, "choices": [choice], "usage": usage}
        return whole(json.dumps(document, separators=(",", ":")).encode())


def nothing() -> None: ...


def whole(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body


@asynccontextmanager
async def serving(upstream: TwoReplies) -> AsyncIterator[str]:
    async with await asyncio.start_server(upstream.serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.fixture(params=["together", "in its last read", "begun", "later"])
def when(request: pytest.FixtureRequest) -> str:
    """Before the next request."""
    chosen: str = request.param
    return chosen


@pytest.fixture(params=list(ClientChoice), ids=lambda choice: choice.value)
def client(request: pytest.FixtureRequest) -> ClientChoice:
    chosen: ClientChoice = request.param
    return chosen


@pytest.fixture(params=[ProtocolChoice.COMPLETIONS, ProtocolChoice.GENERATE], ids=lambda choice: choice.value)
def protocol(request: pytest.FixtureRequest) -> ProtocolChoice:
    chosen: ProtocolChoice = request.param
    return chosen


def wanted(number: int) -> SampleSpec:
    """A prompt of its own, and by generations, which tell no prompt, of its own length."""
    return spec(range(10, 12 + number))


async def sampled(made: Line, number: int) -> list[int] | State:
    """The tokens of a sample, or how else it ended."""
    ending = await made.sample(number, wanted(number))
    if ending.state is not State.READY:
        return ending.state
    assert isinstance(ending.payload, bytes)
    tokens = proto.decode_sample_response(ending.payload).sequences[0].tokens
    return [int.from_bytes(tokens[at : at + 4], "little") for at in range(0, len(tokens), 4)]


def right(number: int) -> list[int]:
    return [11 + number]


async def test_a_second_reply_on_an_idle_connection_is_nobodys(
    when: str, client: ClientChoice, protocol: ProtocolChoice
) -> None:
    upstream = TwoCompletions(when, protocol=protocol)
    async with serving(upstream) as url, line(url, upstream_client=client, protocol=protocol) as made:
        for number in range(TIMES):
            assert await sampled(made, number) == right(number)
            await settled(upstream)
        assert upstream.connections == TIMES
        assert made.counters.faults_wrong_reply == 0


@pytest.mark.parametrize("rewrites_ids", [False, True], ids=["own ids", "a router's ids"])
async def test_a_second_reply_after_the_next_request_is_found_by_what_it_says(
    client: ClientChoice, rewrites_ids: bool, protocol: ProtocolChoice, caplog: pytest.LogCaptureFixture
) -> None:
    """Each connection serves one sample, and is closed at the next, which is executed again on a new one."""
    upstream = TwoCompletions("after the next request", rewrites_ids=rewrites_ids, protocol=protocol)
    async with serving(upstream) as url, line(url, upstream_client=client, protocol=protocol) as made:
        for number in range(TIMES):
            assert await sampled(made, number) == right(number)
        assert upstream.connections == TIMES
        assert made.counters.faults_wrong_reply == TIMES - 1
        assert len([record for record in caplog.records if "wrong reply" in record.message]) == 1


async def test_samples_that_share_one_connection_never_get_each_others_tokens(client: ClientChoice) -> None:
    """A sample that meets a stale reply twice fails in words; none is READY with another's tokens."""
    upstream = TwoCompletions("after the next request", protocol=ProtocolChoice.COMPLETIONS)
    async with serving(upstream) as url, line(url, upstream_client=client, max_connections=1) as made:
        found = await asyncio.gather(*(sampled(made, number) for number in range(6 * TIMES)))
        for number, tokens in enumerate(found):
            assert tokens in (right(number), State.FAILED)
        assert sum(tokens == right(number) for number, tokens in enumerate(found)) > TIMES


async def settled(upstream: TwoReplies) -> None:
    """Send what the server sends late; then let the loop look at its sockets, where it has arrived."""
    upstream.send_late()
    await several_turns()


async def several_turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def ask_in_turn(passage: Edge, upstream: TwoReplies, path: str, **fields: Any) -> None:
    for number in range(TIMES):
        body = json.dumps({"model": "sim/tiny", "user": f"tenant-{number}", **fields}).encode()
        answered = await passage.ask(asking("POST", path, "Content-Type: application/json", body=body))
        assert f"tenant-{number}" in json.loads(body_of(answered))["echo"]
        await settled(upstream)


async def test_a_second_reply_to_what_is_passed_to_vllm_is_nobodys(when: str) -> None:
    upstream = TwoReplies(when)
    async with openai_passage() as passage, serving(upstream) as url:
        passage.bench.pool.replace([url])
        await ask_in_turn(passage, upstream, "/v1/chat/completions", messages=[])
    assert upstream.extras == TIMES


async def test_a_second_reply_to_what_is_passed_to_the_trainer_is_nobodys(when: str) -> None:
    upstream = TwoReplies(when)
    async with training_passage() as passage, serving(upstream) as url:
        passage.trainer._base_url = url
        await ask_in_turn(passage, upstream, "/api/v1/forward_backward")
    assert upstream.extras == TIMES


async def test_a_connection_that_behaves_is_used_again() -> None:
    """The guard costs no connection where nothing is wrong."""
    upstream = TwoReplies("never")
    async with openai_passage() as passage, serving(upstream) as url:
        passage.bench.pool.replace([url])
        await ask_in_turn(passage, upstream, "/v1/chat/completions", messages=[])
    assert upstream.connections == 1
