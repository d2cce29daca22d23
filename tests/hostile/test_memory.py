"""No caller fills a worker's memory beside its limit: counted in bytes held, never by a clock.

A body counts while it arrives, and a reply until its client has read it. Each case ends with nothing held.
"""

from __future__ import annotations

import asyncio
import tracemalloc
from typing import TYPE_CHECKING, Any, Final

import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from shared.config import Settings
from shared.core.admission import most_polls
from shared.core.callers import ApiKey, KeyLimits, Keyring
from shared.core.errors import ReplyBroken
from shared.core.lifecycle import State
from shared.counters import Counters
from shared.http.connection import EdgeConnection
from shared.http.edge import Edge
from shared.http.head import HttpLimits
from shared.http.memory import SMALL_BYTES
from tests.app_bench import API, KEY_A, KEY_B, KEYS, AppBench, asleep, request_id, session_of, settled
from tests.exchanges import RecordingTransport, parse_reply, service_of
from tests.waiting import until
from workers.api.endpoint import Endpoint
from workers.api.replies import Streamed
from workers.parts import Live
from workers.samples.live import Ending

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Send

    from shared.http.exchange import HotEntry
    from shared.http.request import Request
    from workers.samples.quota import Quota

MIB: Final = 1024 * 1024
READ_BYTES: Final = 64 * 1024
LIMITS: Final = HttpLimits()
LIMITED: Final = (ApiKey(KEYS[0].name, KEYS[0].sha256, KeyLimits(max_in_flight_bytes=MIB)), KEYS[1])


class UnreadTransport(RecordingTransport):
    """Its client reads only when the test says so."""

    protocol: EdgeConnection
    unread_bytes = 0
    aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        super().write(data)
        self.unread_bytes += len(data)
        self.set_write_buffer_limits(LIMITS.write_buffer_bytes)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        if self.unread_bytes > (high or 0):
            self.protocol.pause_writing()

    def get_write_buffer_size(self) -> int:
        return self.unread_bytes

    def read_all(self) -> None:
        self.unread_bytes = 0
        self.protocol.resume_writing()

    def abort(self) -> None:
        self.aborted = True


class Client:
    """One client connection of an application."""

    def __init__(self, app: ASGIApp, hot: dict[tuple[bytes, bytes], HotEntry], quota: Quota) -> None:
        self.transport = UnreadTransport()
        self.connection = EdgeConnection(service_of(app, hot, quota), Edge(LIMITS))
        self.transport.protocol = self.connection
        self.connection.connection_made(self.transport)

    def send(self, data: bytes) -> bool:
        """Send what one read takes; return whether the connection still takes more."""
        if self.transport.reading and not self.transport.aborted:
            self.connection.data_received(data)
        return self.transport.reading and not self.transport.aborted

    @property
    def status(self) -> int:
        return parse_reply(self.transport.written).status

    def leave(self) -> None:
        self.connection.connection_lost(None)


def client_of(bench: AppBench) -> Client:
    return Client(bench.app.starlette, dict(bench.app.hot), bench.dispatcher.quota)


def head(path: str, size_bytes: int | None, key: str = KEY_A) -> bytes:
    framing = "Transfer-Encoding: chunked" if size_bytes is None else f"Content-Length: {size_bytes}"
    accept = "Accept: application/x-protobuf, application/json"
    return f"POST {path} HTTP/1.1\r\nHost: h\r\nX-API-Key: {key}\r\n{accept}\r\n{framing}\r\n\r\n".encode()


async def turn() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


BODY_BYTES: Final = 60_000_000
SETTINGS: Final[dict[str, dict[str, Any]]] = {
    "a key's limit": {"api_keys": LIMITED},
    "the worker's limit": {"api_keys": KEYS, "max_in_flight_bytes": MIB},
    "the worker's limit, one key": {"api_keys": KEYS[:1], "max_in_flight_bytes": MIB},
}


@pytest.mark.parametrize("what", SETTINGS)
@pytest.mark.parametrize("path", [f"{API}/asample", f"{API}/asample?routed"])
@pytest.mark.parametrize("framing", ["a length", "chunks"])
async def test_forty_unfinished_bodies(what: str, path: str, framing: str) -> None:
    """All are sent at the same pace, and none is ever whole."""
    bench = await AppBench(**SETTINGS[what]).open()
    quota = bench.dispatcher.quota
    clients = [client_of(bench) for _ in range(40)]
    piece = bytes(READ_BYTES)
    if framing == "chunks":
        piece = b"%x\r\n%b\r\n" % (len(piece), piece)
    tracemalloc.start()
    try:
        for client in clients:
            client.send(head(path, BODY_BYTES if framing == "a length" else None))
        await turn()
        sending, longest = clients, 0
        for sent_bytes in range(0, BODY_BYTES - READ_BYTES, READ_BYTES):
            sending = [client for client in sending if client.send(piece)]
            # One body of any size, and the limit for all others; each read is counted when it is here.
            longest = max(longest, tracemalloc.get_traced_memory()[0])
            assert quota.in_flight_bytes <= sent_bytes + MIB + 2 * READ_BYTES
            await asyncio.sleep(0)
    finally:
        tracemalloc.stop()
    assert longest < BODY_BYTES + 16 * MIB
    taken = [client for client in clients if not client.status]
    assert len(taken) == 1
    assert {client.status for client in clients} == {0, 429}
    assert quota.in_flight_bytes > BODY_BYTES - 2 * READ_BYTES
    if what != "the worker's limit, one key":
        assert (await bench.post("/create_session", key=KEY_B)).status == 200
    # What is small is taken beside it, else nothing would ever be fetched.
    assert (await bench.post("/create_session", key=KEY_A)).status == 200
    for client in clients:
        client.leave()
    await turn()
    assert bench.holds_nothing()
    await bench.close()


async def test_a_body_counts_until_it_is_answered_and_is_then_given_back() -> None:
    """Of any size from a key that holds nothing else; whole, refused by its words, and too large."""
    bench = await AppBench(api_keys=LIMITED).open()
    for size_bytes, status in ((4 * MIB, 400), (READ_BYTES, 400), (65 * MIB, 413)):
        client = client_of(bench)
        client.send(head(f"{API}/asample", size_bytes))
        for at in range(0, size_bytes, READ_BYTES):
            held_bytes = bench.dispatcher.quota.in_flight_bytes
            assert held_bytes in (0, at)
            client.send(bytes(min(READ_BYTES, size_bytes - at)))
        await until(lambda client=client: client.status)  # type: ignore[misc]
        await turn()
        assert client.status == status
        assert bench.holds_nothing()
        client.leave()
    await bench.close()


RESULT_BYTES: Final = 5_000_000


@pytest.mark.parametrize("what", SETTINGS)
async def test_three_hundred_polls_of_a_large_result_that_nobody_reads(what: str) -> None:
    bench = await AppBench(**SETTINGS[what]).open()
    quota = bench.dispatcher.quota
    of = session_of(KEY_A)
    await settled(bench, Ending(State.READY, bytes(RESULT_BYTES)), of=of, key=KEY_A)
    body = b'{"request_id":"%b"}' % request_id(1, of).encode()
    clients = [client_of(bench) for _ in range(300)]
    for client in clients:
        client.send(head(f"{API}/retrieve_future", len(body)) + body)
    await until(lambda: all(client.status for client in clients))
    held_bytes = sum(client.transport.unread_bytes for client in clients)
    assert held_bytes < MIB + RESULT_BYTES
    assert sorted(client.status for client in clients) == [200] + [429] * 299
    assert quota.in_flight_bytes == RESULT_BYTES
    # When it is read there is room for the next, and only a result that was read counts as delivered.
    delivered = next(client for client in clients if client.status == 200)
    assert bench.left_s(of.key(1)) == bench.settings.undelivered_ttl_s
    delivered.transport.read_all()
    await turn()
    assert bench.holds_nothing()
    assert (await bench.retrieve(request_id(1, of), key=KEY_A)).status == 200
    for client in clients:
        client.leave()
    await turn()
    assert bench.holds_nothing()
    await bench.close()


async def test_replies_that_are_streamed_count_while_their_client_does_not_read() -> None:
    bench = await AppBench(api_keys=LIMITED).open()
    quota = bench.dispatcher.quota

    async def handler(request: Request) -> Streamed:
        quota.require_memory(request.caller)

        async def run(send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for at in range(100):
                await send({"type": "http.response.body", "body": bytes(READ_BYTES), "more_body": at < 99})

        return Streamed(run)

    streams = streamed_app(handler)
    clients = [Client(streams, {}, quota) for _ in range(300)]
    for client in clients:
        client.send(head("/x", 0))
        await turn()
    # Two pieces are above the mark of the transport; the next waits until the client reads.
    held_bytes = sum(client.transport.unread_bytes for client in clients if client.status == 200)
    assert held_bytes <= quota.in_flight_bytes + SMALL_BYTES
    assert quota.in_flight_bytes <= MIB + 3 * READ_BYTES
    assert {client.status for client in clients} == {200, 429}
    for client in clients:
        client.leave()
    await turn()
    assert bench.holds_nothing()
    await bench.close()


async def test_a_body_that_is_streamed_counts_by_what_has_arrived_and_was_not_passed_on() -> None:
    bench = await AppBench(api_keys=LIMITED).open()
    quota = bench.dispatcher.quota
    passes = asyncio.Semaphore(0)
    passed: list[int] = []

    async def handler(request: Request) -> Streamed:
        while True:
            await passes.acquire()
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ReplyBroken("gone")
            passed.append(len(message["body"]))

    client = Client(streamed_app(handler), {}, quota)
    client.send(head("/x", 100 * MIB))
    await turn()
    sent_bytes = 0
    while client.send(bytes(READ_BYTES)):
        sent_bytes += READ_BYTES
        assert 0 <= quota.in_flight_bytes - sent_bytes < SMALL_BYTES
    assert quota.in_flight_bytes <= LIMITS.unread_body_bytes + READ_BYTES
    # It counts until the next is asked for: until then it is on its way to the upstream.
    held_bytes = quota.in_flight_bytes
    passes.release()
    await until(lambda: bool(passed))
    # The head came in the first read, and bytes on the wire are counted.
    assert 0 <= quota.in_flight_bytes - held_bytes < SMALL_BYTES
    assert 0 <= quota.in_flight_bytes - passed[0] < SMALL_BYTES
    passes.release()
    await turn()
    assert quota.in_flight_bytes == 0
    client.send(bytes(READ_BYTES))
    await until(lambda: len(passed) == 2)
    passes.release()
    client.leave()
    await turn()
    assert bench.holds_nothing()
    await bench.close()


def streamed_app(handler: Any) -> Starlette:
    endpoint = Endpoint(handler, Live(Settings(), Keyring(LIMITED)), Counters(), streamed=True)
    return Starlette(routes=[Route("/x", endpoint, methods=["POST"])])


@pytest.mark.parametrize("kind", ["of a sample", "of a session", "of an unknown session"])
async def test_held_polls_have_a_bound_of_their_own_and_above_it_a_429(kind: str) -> None:
    """Never a 408 at once, which the SDK repeats without a pause."""
    keys = (ApiKey(KEYS[0].name, KEYS[0].sha256, KeyLimits(max_in_flight=20)), KEYS[1])
    bench = await AppBench(api_keys=keys).open()

    def poll(key: str) -> asyncio.Task[Any]:
        of = session_of(key)
        if kind == "of a sample":
            return asyncio.create_task(bench.retrieve(request_id(1, of), key=key))
        of = of if kind == "of a session" else session_of(KEY_B if key == KEY_A else KEY_A)
        return asyncio.create_task(bench.poll_session(of, timeout_s=30.0, key=key))

    if kind == "of a sample":
        for key in (KEY_A, KEY_B):
            assert (await bench.asample(1, of=session_of(key), key=key)).status == 200
    held = [poll(KEY_A) for _ in range(most_polls(20))]
    assert len(held) == 24
    await asleep(bench, 24)
    refused = await poll(KEY_A)
    assert (refused.status, bench.counters.rejected_key) == (429, 1)
    assert "polls of this key are held" in refused.json["detail"]
    # Another key, and one more when one has ended.
    held.append(poll(KEY_B))
    await asleep(bench, 25)
    bench.waiters.send_back()
    statuses = {(await task).status for task in held}
    assert statuses == ({408} if kind == "of a sample" else {200})
    last = poll(KEY_A)
    await asleep(bench)
    bench.waiters.send_back()
    assert (await last).status in (200, 408)
    assert not bench.dispatcher.quota.key_usage.polls
    await bench.close()
