"""Bodies and replies of any size, cut ones, slow ones, and clients that leave: over real sockets on both sides."""

from __future__ import annotations

import asyncio
import os
from hashlib import sha256
from typing import TYPE_CHECKING, Final

import pytest

from shared.http.head import HttpLimits
from tests.integration.http.edge_server import MIB, Client
from tests.integration.passthrough.passage import Passage, asking, body_of, head_of, stands_still, training_passage
from tests.integration.passthrough.raw_upstream import OK, Exchange, reply, soon
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PATH: Final = "/api/v1/forward_backward"
LARGE_BYTES: Final = 200 * MIB
# Above what both directions hold in socket buffers and in ours; a body that was collected would be far above.
MAY_GROW_BYTES: Final = 48 * MIB
PIECE: Final = bytes(range(256)) * 4096


@pytest.fixture
async def passage() -> AsyncIterator[Passage]:
    async with training_passage() as passage:
        yield passage


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Peak:
    """The most memory seen at a look, above that of the beginning."""

    def __init__(self) -> None:
        self._start_bytes = resident_bytes()
        self.grown_bytes = 0

    def look(self) -> None:
        self.grown_bytes = max(self.grown_bytes, resident_bytes() - self._start_bytes)


class Upload:
    """A POST whose reply closes the connection. `digest` is that of what was sent so far."""

    def __init__(self, client: Client, size_bytes: int) -> None:
        self._client = client
        self._size_bytes = size_bytes
        self.digest = sha256()
        self.sent_bytes = 0

    async def run(self) -> bool:
        """Whether the server took it all."""
        whole = await self._client.send(asking("POST", PATH, f"Content-Length: {self._size_bytes}"))
        while whole and self.sent_bytes < self._size_bytes:
            whole = await self._client.send(PIECE)
            self.digest.update(PIECE)
            self.sent_bytes += len(PIECE)
        return whole


async def test_a_body_of_200_mib_streams_through_in_bounded_memory(passage: Passage) -> None:
    peak, received, size_bytes = Peak(), sha256(), 0

    async def digest(exchange: Exchange) -> None:
        nonlocal size_bytes
        async for piece in exchange.body():
            received.update(piece)
            size_bytes += len(piece)
            peak.look()
        await exchange.say(OK)

    passage.upstream.handler = digest
    client = await passage.connect()
    upload = Upload(client, LARGE_BYTES)
    assert await upload.run()
    assert head_of(await soon(client.read_to_end()))[":status"] == "200"
    client.close()
    assert (size_bytes, received.hexdigest()) == (LARGE_BYTES, upload.digest.hexdigest())
    assert passage.upstream.last.header("content-length") == str(LARGE_BYTES)
    assert peak.grown_bytes < MAY_GROW_BYTES


async def test_a_reply_of_200_mib_streams_through_in_bounded_memory(passage: Passage) -> None:
    peak = Peak()

    async def answer(exchange: Exchange) -> None:
        await exchange.whole_body()
        await exchange.say(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % LARGE_BYTES)
        for _ in range(LARGE_BYTES // len(PIECE)):
            await exchange.say(PIECE)

    passage.upstream.handler = answer
    client = await passage.connect()
    await client.send(asking("GET", "/api/v1/training_runs"))
    size_bytes = 0
    while piece := await client.read(MIB):
        size_bytes += len(piece)
        peak.look()
    client.close()
    assert LARGE_BYTES < size_bytes < LARGE_BYTES + 4096
    assert peak.grown_bytes < MAY_GROW_BYTES


async def test_a_slow_upstream_slows_the_client_down(passage: Passage) -> None:
    go_on = asyncio.Event()

    async def wait(exchange: Exchange) -> None:
        await go_on.wait()
        await exchange.whole_body()
        await exchange.say(OK)

    passage.upstream.handler = wait
    client = await passage.connect()
    upload = Upload(client, 128 * MIB)
    sending = asyncio.create_task(upload.run())
    await until(lambda: passage.upstream.exchanges, "the upstream to be asked")
    await stands_still(lambda: upload.sent_bytes)
    # Four socket buffers and a few of ours.
    assert upload.sent_bytes < 64 * MIB
    go_on.set()
    assert await soon(sending)
    assert head_of(await soon(client.read_to_end()))[":status"] == "200"
    client.close()


async def test_a_client_that_reads_slowly_slows_the_upstream_down(passage: Passage) -> None:
    said = 0

    async def pour(exchange: Exchange) -> None:
        nonlocal said
        await exchange.say(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % LARGE_BYTES)
        while said < LARGE_BYTES:
            await exchange.say(PIECE)
            said += len(PIECE)

    passage.upstream.handler = pour
    client = await passage.connect()
    await client.send(asking("GET", "/api/v1/training_runs"))
    await until(lambda: said, "the reply to begin")
    await stands_still(lambda: said)
    assert said < LARGE_BYTES // 4
    client.close()


async def test_a_chunked_body_stays_chunked(passage: Passage) -> None:
    bodies: list[bytes] = []

    async def keep(exchange: Exchange) -> None:
        bodies.append(await exchange.whole_body())
        await exchange.say(OK)

    passage.upstream.handler = keep
    answered = await passage.ask(
        asking("POST", PATH, "Transfer-Encoding: chunked") + b"3\r\nabc\r\n4\r\ndefg\r\n0\r\n\r\n"
    )
    assert head_of(answered)[":status"] == "200"
    assert bodies == [b"abcdefg"]
    assert passage.upstream.last.header("transfer-encoding") == "chunked"
    assert passage.upstream.last.header("content-length") is None


async def test_a_stream_of_events_is_passed_on_event_by_event(passage: Passage) -> None:
    go_on = asyncio.Event()

    async def events(exchange: Exchange) -> None:
        await exchange.say(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        await exchange.say(b"9\r\ndata: 1\n\n\r\n")
        await go_on.wait()
        await exchange.say(b"9\r\ndata: 2\n\n\r\n0\r\n\r\n")

    passage.upstream.handler = events
    client = await passage.connect()
    await client.send(asking("GET", "/api/v1/sessions/x/trace_export"))
    first = await client.read_until(b"data: 1\n\n\r\n")
    go_on.set()
    assert body_of(first + await soon(client.read_to_end())) == b"data: 1\n\ndata: 2\n\n"
    client.close()


@pytest.mark.parametrize("when", ["before the status", "in the reply", "in the body"])
async def test_a_client_that_leaves_closes_the_upstream_request(passage: Passage, when: str) -> None:
    async def wait(exchange: Exchange) -> None:
        if when == "in the reply":
            await exchange.say(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc")
        await exchange.wait_closed()

    passage.upstream.handler = wait
    client = await passage.connect()
    length = 100 if when == "in the body" else 2
    await client.send(f"POST {PATH} HTTP/1.1\r\nHost: h\r\nContent-Length: {length}\r\n\r\n{{}}".encode())
    await until(lambda: passage.upstream.exchanges, "the upstream to be asked")
    if when == "in the reply":
        await client.read_until(b"abc")
    client.close()
    await soon(passage.upstream.last.closed.wait())
    await until(lambda: passage.trainer.in_flight == 0, "the exchange to be over")


@pytest.mark.parametrize("framing", [b"Content-Length: 100", b"Transfer-Encoding: chunked"])
async def test_a_reply_that_breaks_off_does_not_look_whole(
    passage: Passage, framing: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def cut(exchange: Exchange) -> None:
        await exchange.say(b"HTTP/1.1 200 OK\r\n" + framing + b"\r\n\r\n3\r\nabc\r\n")
        exchange.writer.close()

    passage.upstream.handler = cut
    answered = await passage.ask(asking("GET", "/api/v1/checkpoints"))
    assert b"abc" in answered
    assert not answered.endswith(b"0\r\n\r\n")
    assert len(answered.partition(b"\r\n\r\n")[2]) < 100
    await until(lambda: not passage.served.edge.open, "the connection to be cut")
    assert [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []


async def test_an_early_reply_ends_the_upload(passage: Passage) -> None:
    async def refuse(exchange: Exchange) -> None:
        await exchange.say(reply("413 Too Large", b'{"detail":"no"}', "Connection: close"))
        await exchange.wait_closed()

    passage.upstream.handler = refuse
    client = await passage.connect()
    sending = asyncio.create_task(Upload(client, 64 * MIB).run())
    answered = await client.read_until(b"}")
    assert head_of(answered)[":status"] == "413"
    await soon(passage.upstream.last.closed.wait())
    client.close()
    await soon(sending)


async def test_an_upload_has_no_total_deadline_but_must_move() -> None:
    """B16: a body may take as long as its bytes do at the least rate; the upstream's own time is not counted."""
    go_on = asyncio.Event()
    limits = HttpLimits(least_bytes_per_s=1024)

    async def wait(exchange: Exchange) -> None:
        await go_on.wait()
        await exchange.whole_body()
        await exchange.say(OK)

    async with training_passage(limits) as passage:
        passage.upstream.handler = wait
        client = await passage.connect()
        upload = Upload(client, 64 * MIB)
        sending = asyncio.create_task(upload.run())
        await until(lambda: passage.upstream.exchanges, "the upstream to be asked")
        await stands_still(lambda: upload.sent_bytes)
        for later_s in range(0, 40_000, 1000):
            passage.served.sweep_after(later_s)
        go_on.set()
        assert await soon(sending)
        assert head_of(await soon(client.read_to_end()))[":status"] == "200"
        client.close()

        stuck = await passage.connect()
        await stuck.send(f"POST {PATH} HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\nabc".encode())
        await until(lambda: len(passage.upstream.exchanges) == 2, "the upstream to be asked")
        passage.served.sweep_after(60_000)
        passage.served.sweep_after(120_000)
        assert head_of(await soon(stuck.read_to_end()))[":status"] == "408"
        await until(lambda: passage.trainer.in_flight == 0, "the exchange to be over")
        stuck.close()
