"""A client without a key costs little, whatever it sends: counted in calls of Python functions and in bytes.

Each input is sent byte for byte as an attacker would, in one piece or in reads of a socket's size. `calls` counts every
Python call of the process meanwhile, so that work cannot hide in a place that no test looks at.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import contextmanager
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from shared.config import Settings
from shared.core.callers import ApiKey, Keyring
from shared.counters import Counters
from shared.http.connection import EdgeConnection
from shared.http.edge import Edge
from shared.http.head import HttpLimits
from tests.exchanges import PER_TURN, RecordingTransport, parse_reply, service_of
from tests.waiting import until
from workers.api import replies
from workers.api.endpoint import Endpoint
from workers.parts import Live

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shared.http.exchange import Service
    from shared.http.request import Request
    from workers.api.replies import Reply

MIB: Final = 1024 * 1024
READ_BYTES: Final = 64 * 1024
HEAD: Final = b"POST /x HTTP/1.1\r\nHost: h\r\n"
CHUNKED: Final = HEAD + b"Transfer-Encoding: chunked\r\n"
KEY: Final = b"X-API-Key: tml-a\r\n"
TINY_CHUNKS: Final = b"1\r\nx\r\n"
# Of one request with a small body, whichever way it takes.
CALLS_OF_A_REQUEST: Final = 400
LIMITS: Final = HttpLimits()


class Attack:
    """One connection on which bytes arrive as from a socket."""

    def __init__(self, way: str, beside: Attack | None = None) -> None:
        """`beside`: another connection to the same server."""

        async def handler(request: Request) -> Reply:
            self.bodies.append(request.body)
            return replies.ok()

        keys = Keyring([ApiKey("a", sha256(b"tml-a").hexdigest())])
        endpoint = Endpoint(handler, Live(Settings(max_body_bytes=64 * MIB), keys), Counters(), in_turns=True)
        app = Starlette(routes=[Route("/x", endpoint, methods=["POST"])])
        hot = {(b"POST", b"/x"): endpoint} if way == "hot" else {}
        self.service: Service = beside.service if beside else service_of(app, hot)
        self.bodies: list[bytes] = beside.bodies if beside else []
        self.taken_bytes = 0
        self.transport = AbortedTransport()
        self.connection = EdgeConnection(self.service, Edge(LIMITS))
        self.connection.connection_made(self.transport)

    async def send(self, data: bytes) -> None:
        """Until all is taken, or the connection is cut. A turn of the loop passes after each read."""
        for at in range(0, len(data), READ_BYTES):
            if self.transport.aborted or not self.transport.reading:
                break
            piece = data[at : at + READ_BYTES]
            self.taken_bytes += len(piece)
            self.connection.data_received(piece)
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)

    def end(self) -> None:
        self.connection.connection_lost(None)

    @property
    def status(self) -> int:
        return parse_reply(self.transport.written).status


class AbortedTransport(RecordingTransport):
    aborted = False

    def abort(self) -> None:
        self.aborted = True

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        pass


@contextmanager
def calls() -> Iterator[list[int]]:
    """How many Python functions were called within the block."""
    counted = [0]

    def count(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            counted[0] += 1

    sys.setprofile(count)
    try:
        yield counted
    finally:
        sys.setprofile(None)


@pytest.fixture(params=["hot", "routed"])
async def attack(request: pytest.FixtureRequest) -> Any:
    made = Attack(request.param)
    yield made
    made.end()


BODIES: Final = {
    "one-byte chunks": CHUNKED + b"\r\n" + TINY_CHUNKS * (MIB),
    "chunks with extensions": CHUNKED + b"\r\n" + (b"1;" + b"e" * 500 + b"\r\nx\r\n") * 12_000,
    "large chunks": CHUNKED + b"\r\n" + (b"8000\r\n" + bytes(0x8000) + b"\r\n") * 192,
    "a length": HEAD + b"Content-Length: %d\r\n\r\n" % (6 * MIB) + bytes(6 * MIB),
    "requests without end": (HEAD + b"Content-Length: 2\r\n\r\n{}") * 100_000,
}


@pytest.mark.parametrize("what", BODIES)
async def test_six_megabytes_of_a_stranger(attack: Attack, what: str) -> None:
    with calls() as counted:
        await attack.send(BODIES[what])
    # One read or so is parsed before it is known who sends it; a flood of requests ends at the limit of a turn.
    requests = LIMITS.pipelined + 2 if what == "requests without end" else 1
    reads = LIMITS.discard_bytes // READ_BYTES
    assert counted[0] < requests * CALLS_OF_A_REQUEST + reads * 30 + LIMITS.free_chunks * 10
    assert attack.taken_bytes <= LIMITS.discard_bytes + LIMITS.unread_body_bytes + 2 * READ_BYTES
    assert attack.status in (400, 401)
    assert not attack.bodies


@pytest.mark.parametrize("what", ["one-byte chunks", "chunks with extensions"])
async def test_tiny_chunks_of_a_known_key_are_refused_by_name(attack: Attack, what: str) -> None:
    with calls() as counted:
        await attack.send(BODIES[what].replace(b"\r\n\r\n", b"\r\n" + KEY + b"\r\n", 1))
    answered = parse_reply(attack.transport.written)
    assert (answered.status, "chunks" in answered.json["detail"]) == (400, True)
    assert counted[0] < CALLS_OF_A_REQUEST + LIMITS.free_chunks * 10 + LIMITS.discard_bytes // READ_BYTES * 30


@pytest.mark.parametrize("chunk_bytes", [LIMITS.chunk_bytes, 4096])
async def test_chunks_of_a_fair_size_are_taken(attack: Attack, chunk_bytes: int) -> None:
    chunk = b"%x\r\n%b\r\n" % (chunk_bytes, b"x" * chunk_bytes)
    await attack.send(CHUNKED + KEY + b"\r\n" + chunk * 1000 + b"0\r\n\r\n")
    assert attack.status == 200
    assert attack.bodies == [b"x" * chunk_bytes * 1000]


async def test_a_few_tiny_chunks_are_taken(attack: Attack) -> None:
    await attack.send(CHUNKED + KEY + b"\r\n" + TINY_CHUNKS * LIMITS.free_chunks + b"0\r\n\r\n")
    assert attack.bodies == [b"x" * LIMITS.free_chunks]


REFUSED: Final = {
    "two hosts": b"POST /x HTTP/1.1\r\nHost: a\r\nHost: a\r\n" + KEY + b"Content-Length: 2\r\n\r\n{}",
    "RTSP/1.0": b"POST /x RTSP/1.0\r\nHost: a\r\n" + KEY + b"Content-Length: 2\r\n\r\n{}",
    "RTSP/1.1": b"POST /x RTSP/1.1\r\nHost: a\r\n" + KEY + b"Content-Length: 2\r\n\r\n{}",
    "RTSP behind HTTP": b"POST /x HTTP/1.1\r\nHost: a\r\n"
    + KEY
    + b"Content-Length: 2\r\n\r\n{}POST /x RTSP/1.0\r\nHost: a\r\n\r\n",
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("piece_bytes", [1, 1 << 20], ids=["byte by byte", "whole"])
async def test_what_is_no_http_or_may_mean_two_things(attack: Attack, what: str, piece_bytes: int) -> None:
    data = REFUSED[what]
    for at in range(0, len(data), piece_bytes):
        await attack.send(data[at : at + piece_bytes])
    assert b"HTTP/1.1 400" in attack.transport.written
    assert attack.bodies == ([b"{}"] if what == "RTSP behind HTTP" else [])


async def test_two_keys_are_none(attack: Attack) -> None:
    await attack.send(HEAD + KEY + KEY + b"Content-Length: 2\r\n\r\n{}")
    assert (attack.status, attack.bodies) == (401, [])


async def test_replies_that_a_stranger_does_not_read_are_not_kept(attack: Attack) -> None:
    """A few requests in each read, for ever: no more replies are made than fit below the mark."""
    attack.connection.pause_writing()
    for _ in range(200):
        await attack.send((HEAD + b"Content-Length: 2\r\n\r\n{}") * 4)
    assert attack.transport.written.count(b"HTTP/1.1 401") == 0
    assert attack.taken_bytes < 64 * 1024


@pytest.mark.parametrize("body", [b"", b"Content-Length: 0\r\n", b"Content-Length: 2\r\n"])
async def test_a_crowd_in_one_turn_is_answered_once_each(attack: Attack, body: bytes) -> None:
    """A request without a body is whole with its head: it must not enter the turns of the loop twice."""
    data = HEAD + KEY + body + b"\r\n" + (b"{}" if b"2" in body else b"")
    crowd = [attack, *(Attack("", beside=attack) for _ in range(5 * PER_TURN))]
    for one in crowd:
        one.connection.data_received(data * 2)
    await until(lambda: not attack.service.tasks and not attack.service.turns, "all are answered")
    await attack.send(data)
    assert [one.transport.written.count(b"HTTP/1.1 200 OK") for one in crowd] == [3] + [2] * 5 * PER_TURN
    assert len(attack.bodies) == 2 * len(crowd) + 1
    for one in crowd[1:]:
        one.end()
