"""Sizes and deadlines: what is too large, half sent, or not read is answered or cut, and costs little until then."""

from __future__ import annotations

import asyncio
import gc
import logging
from typing import TYPE_CHECKING, Final

import pytest

from shared.http.connection import EdgeConnection
from shared.http.head import HttpLimits
from tests.integration.http.edge_server import MIB, Served, now_s, refusal_in, request, serving, status_of
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

START: Final = b"GET /echo HTTP/1.1\r\nHost: h\r\n"
HALF_BODY: Final = b"POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\n" + b"x" * 50


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """B13"""
    caplog.set_level(logging.DEBUG)
    yield
    assert [record.getMessage() for record in caplog.get_records("call") if record.levelno > logging.DEBUG] == []


def protocols(served: Served) -> list[EdgeConnection]:
    return [each for each in served.edge.open if isinstance(each, EdgeConnection)]


def living_protocols(served: Served) -> int:
    gc.collect()
    return sum(isinstance(each, EdgeConnection) and each.edge is served.edge for each in gc.get_objects())


# -- sizes

HEADS: Final = {
    "one header of 64 KB": (START + b"A: " + b"a" * 65_536 + b"\r\n\r\n", 431),
    "5,000 headers": (START + b"".join(b"h%d: v\r\n" % n for n in range(5_000)) + b"\r\n", 431),
    "101 headers": (START + b"a: b\r\n" * 100 + b"\r\n", 431),
    "many headers of 1 KB": (START + (b"a: " + b"b" * 1_000 + b"\r\n") * 40 + b"\r\n", 431),
    "a name of 64 KB": (START + b"a" * 65_536 + b": b\r\n\r\n", 431),
    "URL of 9 KB": (b"GET /" + b"a" * 9_000 + b" HTTP/1.1\r\nHost: h\r\n\r\n", 414),
}


@pytest.mark.parametrize("what", HEADS)
async def test_a_head_that_is_too_large(what: str) -> None:
    """B14"""
    data, expected = HEADS[what]
    async with serving() as served:
        assert refusal_in(await served.exchange(data))[0] == expected
        assert not served.app.scopes


async def test_a_head_within_the_limits() -> None:
    """B14: the bounds are not lower than they say."""
    url = b"/echo?" + b"u" * 8_000
    headers = b"A: " + b"a" * 16_000 + b"\r\n" + b"b: c\r\n" * 97
    async with serving() as served:
        client = await served.connect()
        await client.send(b"GET " + url + b" HTTP/1.1\r\nHost: h\r\n" + headers + b"\r\n")
        assert status_of(await client.read()) == 200
        assert len(served.app.scopes[0]["headers"]) == 99
        client.close()


@pytest.mark.parametrize("start", [b"A: ", b"", b"a"], ids=["value", "name", "name begun"])
async def test_a_header_of_20_mb_is_cut_early(start: bytes) -> None:
    """B14: long before it is all sent, though the parser hands over nothing of it."""
    async with serving() as served:
        client = await served.connect()
        await client.send(START + start)
        assert not await client.send(b"a" * (20 * MIB))
        client.close()
        await until(lambda: not served.edge.open, "the connection is closed")
        assert not served.app.scopes


async def test_a_chunk_extension_without_end_is_cut() -> None:
    async with serving() as served:
        client = await served.connect()
        await client.send(b"POST /echo HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n3;")
        await until(lambda: served.app.scopes, "the application has begun")
        assert not await client.send(b"e" * (20 * MIB))
        client.close()
        await until(lambda: served.app.incomplete == 1, "the application knows")


async def test_an_early_reply_is_read_although_the_body_still_comes() -> None:
    async with serving() as served:
        client = await served.connect()
        await client.send(b"POST /early HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % (3 * MIB))
        assert await client.send(b"x" * (3 * MIB))
        assert status_of(await client.read_until(b"too large")) == 413
        await client.send(request("POST", "/echo", b"next"))
        assert status_of(await client.read_until(b"next")) == 200
        client.close()


async def test_an_early_reply_that_is_the_last_is_not_lost_with_the_body() -> None:
    async with serving() as served:
        client = await served.connect()
        assert await client.send(request("POST", "/early", bytes(MIB), "Connection: close"))
        assert (await client.read_to_the_goodbye()).endswith(b"too large")
        await until(lambda: not served.edge.open, "the body was whole")
        client.close()


async def test_a_body_that_goes_on_after_its_reply_is_cut() -> None:
    async with serving() as served:
        client = await served.connect()
        await client.send(b"POST /early HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % (100 * MIB))
        assert not await client.send(bytes(100 * MIB))
        client.close()


async def test_the_body_that_was_asked_about_is_not_waited_for() -> None:
    async with serving() as served:
        reply = await served.exchange(request("POST", "/early", b"", "Expect: 100-continue", "Content-Length: 9"))
        assert status_of(reply) == 413


@pytest.mark.parametrize(("version", "interim"), [("1.1", True), ("1.0", False)])
async def test_an_interim_reply_is_for_those_who_know_what_it_is(version: str, interim: bool) -> None:
    async with serving() as served:
        client = await served.connect()
        head = request("POST", "/echo", b"", "Expect: 100-continue", "Content-Length: 4", "Connection: close")
        await client.send(head.replace(b"HTTP/1.1", b"HTTP/" + version.encode()))
        if interim:
            await client.read_until(b"100 Continue\r\n\r\n")
        await client.send(b"body")
        assert status_of(await client.read_until(b"body")) == 200
        client.close()


# -- deadlines


@pytest.mark.parametrize("half", [b"G", START, START + b"A: b"], ids=["a letter", "a header", "half a header"])
async def test_half_sent_heads(half: bytes) -> None:
    """B16"""
    async with serving() as served:
        begun_s = now_s()
        clients = [await served.connect() for _ in range(20)]
        for client in clients:
            await client.send(half)
        await until(lambda: len(served.edge.arriving) == 20, "all have begun")
        served.sweep_after(29.0, begun_s)
        assert len(served.edge.arriving) == 20
        served.sweep_after(31.0)
        for client in clients:
            assert refusal_in(await client.read_to_end())[0] == 408
            client.close()
        await until(lambda: not served.edge.open, "all connections closed")


async def test_half_sent_body() -> None:
    """B16, B13"""
    async with serving() as served:
        begun_s = now_s()
        client = await served.connect()
        await client.send(HALF_BODY)
        await until(lambda: served.edge.arriving and served.app.scopes, "the body has begun")
        served.sweep_after(59.0, begun_s)
        assert len(served.edge.arriving) == 1
        served.sweep_after(120.0)
        assert refusal_in(await client.read_to_end())[0] == 408
        await until(lambda: served.app.incomplete == 1, "the application knows, though the client is still there")
        assert served.edge.open and not served.app.bodies
        client.close()


async def test_a_body_at_a_fair_rate_has_time() -> None:
    """10 MiB in 200 s is above 64 KiB/s only because of the first minute: it may go on, a slower one not."""
    async with serving() as served:
        begun_s = now_s()
        client = await served.connect()
        await client.send(b"POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % (11 * MIB))
        await client.send(bytes(10 * MIB))
        await until(lambda: served.edge.arriving, "the body has begun")
        await until(lambda: [each._parser.body_bytes for each in protocols(served)] == [10 * MIB], "10 MiB have come")
        served.sweep_after(200.0, begun_s)
        assert len(served.edge.arriving) == 1
        served.sweep_after(450.0)
        assert refusal_in(await client.read_to_end())[0] == 408
        client.close()


async def test_time_in_which_we_do_not_read_is_not_the_clients() -> None:
    """A body behind a request that is being answered is read up to a mark, however long the answer takes."""
    body = b"x" * (8 * MIB)
    async with serving() as served:
        client = await served.connect()
        await client.send(request("GET", "/hold"))
        await until(lambda: served.app.bodies, "the first is being answered")
        sending = asyncio.create_task(client.send(request("POST", "/echo", body)))
        await until(lambda: any(each.flow.read_paused for each in protocols(served)), "reading has paused")
        served.sweep_after(31.0)
        served.sweep_after(1_000.0)
        served.app.release.set()
        assert await sending
        assert (await client.read_until(b"held")).startswith(b"HTTP/1.1 200")
        await until(lambda: len(served.app.bodies) == 2, "the second was read whole")
        assert served.app.bodies[1] == body
        client.close()


@pytest.mark.parametrize("said", [b"", b"\r\n\r\n", request("GET", "/echo")], ids=["nothing", "empty lines", "one"])
async def test_idle_connections_are_closed_by_the_keep_alive_time(said: bytes) -> None:
    """B16"""
    async with serving() as served:
        begun_s = now_s()
        client = await served.connect()
        await client.send(said)
        await until(lambda: len(served.edge.idle) == 1 and (b"GET" not in said or served.app.scopes), "idle")
        served.sweep_after(74.0, begun_s)
        assert len(served.edge.idle) == 1
        served.sweep_after(76.0)
        await client.read_to_end()
        client.close()


async def test_a_client_that_idles_for_five_seconds_between_requests_keeps_its_connection() -> None:
    """B8: many servers close at 5.0 s, when clients of 5 s are about to send."""
    async with serving() as served:
        client = await served.connect()
        for idle_s in (4.9, 4.99, 5.0, 5.01, 5.1):
            await client.send(request("GET", "/small"))
            assert status_of(await client.read_until(b"held")) == 200
            await until(lambda: len(served.edge.idle) == 1, "idle")
            served.sweep_after(idle_s)
        assert len(served.app.scopes) == 5
        assert len(served.edge.open) == 1
        client.close()


async def test_a_held_request_has_no_deadline() -> None:
    async with serving() as served:
        client = await served.connect()
        await client.send(request("GET", "/hold"))
        await until(lambda: served.app.bodies, "held")
        served.sweep_after(10_000.0)
        served.app.release.set()
        assert status_of(await client.read_until(b"held")) == 200
        client.close()


@pytest.mark.parametrize("headers", [(), ("Connection: close",)], ids=["keep-alive", "close"])
async def test_a_reader_that_does_not_read_is_cut(headers: tuple[str, ...]) -> None:
    """B16: a large reply is not kept for ever, and was not delivered."""
    async with serving() as served:
        client = await served.connect()
        begun_s = now_s()
        await client.send(request("GET", "/big", b"", *headers))
        await until(lambda: served.edge.unread, "the reply waits")
        served.sweep_after(59.0, begun_s)
        assert not served.app.delivered
        served.sweep_after(61.0)
        await until(lambda: served.app.delivered == [False] and not served.edge.open, "cut")
        client.close()


async def test_a_reader_that_trickles_is_cut() -> None:
    """B16: less than the least rate is as good as nothing."""
    async with serving() as served:
        client = await served.connect()
        await client.send(request("GET", "/big"))
        await until(lambda: served.edge.unread, "the reply waits")
        (watched,) = protocols(served)
        taken_bytes = 0
        while watched.transport.get_write_buffer_size() == watched._unread_bytes:
            taken_bytes += len(await client.read())
        assert taken_bytes < 60 * 64 * 1024
        served.sweep_after(61.0)
        await until(lambda: served.app.delivered == [False], "cut")
        client.close()


async def test_a_last_reply_that_nobody_reads_is_cut() -> None:
    """B16: also where the transport never asked us to pause, and the connection only waits to be closed."""
    async with serving(HttpLimits(write_buffer_bytes=64 * MIB)) as served:
        client = await served.connect()
        await client.send(request("POST", "/echo", bytes(16 * MIB), "Connection: close"))
        await until(lambda: served.edge.lingering, "answered")
        assert not served.edge.unread
        served.sweep_after(6.0)
        assert len(served.edge.unread) == 1
        served.sweep_after(61.0)
        await until(lambda: not served.edge.open, "cut")
        client.close()


async def test_a_reader_that_reads_is_left_alone() -> None:
    async with serving(HttpLimits(least_bytes_per_s=1_024)) as served:
        client = await served.connect()
        await client.send(request("GET", "/big"))
        await until(lambda: served.edge.unread, "the reply waits")
        size_bytes = 0
        while size_bytes < 2 * MIB:
            size_bytes += len(await client.read())
        (watched,) = protocols(served)
        await until(lambda: watched.transport.get_write_buffer_size() < watched._unread_bytes - MIB, "progress")
        served.sweep_after(61.0)
        while size_bytes < 8 * MIB:
            size_bytes += len(await client.read())
        await until(lambda: served.app.delivered == [True], "delivered")
        client.close()


# -- leaks


async def test_connections_that_are_reset_leave_nothing() -> None:
    """B7"""
    async with serving() as served:
        for _ in range(10):
            clients = [await served.connect() for _ in range(50)]
            for client in clients:
                await client.send(request("GET", "/echo"))
            for client in clients:
                assert status_of(await client.read()) == 200
                client.reset()
            del client, clients
        await until(lambda: not served.edge.open, "all resets noticed")
        assert len(served.app.scopes) == 500
        served.app.scopes.clear()
        await until(lambda: living_protocols(served) < 10, "protocol objects are gone")
        assert not served.edge.idle


async def test_an_upload_cut_at_half() -> None:
    """B13"""
    async with serving() as served:
        for ending in ("close", "reset"):
            client = await served.connect()
            await client.send(HALF_BODY)
            await until(lambda: served.edge.arriving, "the body has begun")
            getattr(client, ending)()
            await until(lambda: not served.edge.open, "noticed")
        await until(lambda: served.app.incomplete == 2, "the application knows")
        assert not served.app.bodies
