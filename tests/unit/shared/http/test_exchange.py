"""A whole reply in one write says what uvicorn says in two."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from shared.http.exchange import WHOLE_REPLY, GatewayCycle

LOGGER = logging.getLogger("tests.cycle")
HEADERS = [(b"content-type", b"application/json")]


class Transport:
    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        self.writes.append(data)

    def writelines(self, parts: Any) -> None:
        self.writes.append(b"".join(parts))

    def close(self) -> None:
        self.closed = True


class Flow:
    write_paused = False

    async def drain(self) -> None:
        self.write_paused = False


class Bench:
    def __init__(self, method: str = "POST", *, keep_alive: bool = True) -> None:
        self.transport, self.flow, self.ended = Transport(), Flow(), 0
        self.ended_within_body = False
        self.cycle = GatewayCycle(
            {"method": method},
            self.transport,
            self.flow,
            LOGGER,
            LOGGER,
            False,
            [],
            asyncio.Event(),
            False,
            keep_alive,
            self._on_end,
            end_within_body=self._end_within_body,
        )
        self.cycle.whole()

    def _on_end(self) -> None:
        self.ended += 1

    def _end_within_body(self) -> None:
        self.ended_within_body = True

    async def whole(self, status: int, body: bytes | memoryview) -> None:
        await self.cycle.send({"type": WHOLE_REPLY, "status": status, "headers": HEADERS, "body": body})

    async def in_two(self, status: int, body: bytes) -> None:
        length = (b"content-length", str(len(body)).encode())
        await self.cycle.send({"type": "http.response.start", "status": status, "headers": [*HEADERS, length]})
        await self.cycle.send({"type": "http.response.body", "body": body})


@pytest.mark.parametrize("method", ["POST", "HEAD"])
@pytest.mark.parametrize("keep_alive", [True, False])
@pytest.mark.parametrize("body", [b"", b"{}", b"x" * 100_000])
@pytest.mark.parametrize("status", [200, 408, 429])
async def test_the_bytes_are_the_same(method: str, keep_alive: bool, body: bytes, status: int) -> None:
    ours, theirs = Bench(method, keep_alive=keep_alive), Bench(method, keep_alive=keep_alive)
    await ours.whole(status, memoryview(body))
    await theirs.in_two(status, body)
    assert sorted(lines(ours)) == sorted(lines(theirs))
    assert b"".join(ours.transport.writes).partition(b"\r\n\r\n")[2] == (body if method == "POST" else b"")
    assert ours.transport.closed == theirs.transport.closed == (not keep_alive)
    assert ours.ended == theirs.ended == 1
    if method == "POST":
        assert len(ours.transport.writes) == 1


@pytest.mark.parametrize("keep_alive", [True, False])
async def test_a_last_reply_that_does_not_wait_for_the_body_does_not_close(keep_alive: bool) -> None:
    bench = Bench(keep_alive=keep_alive)
    bench.cycle.more_body = True
    await bench.whole(413, b"{}")
    assert (bench.ended_within_body, bench.transport.closed) == (not keep_alive, False)


def lines(bench: Bench) -> list[bytes]:
    return b"".join(bench.transport.writes).partition(b"\r\n\r\n")[0].split(b"\r\n")


async def test_nothing_is_written_for_who_has_left() -> None:
    bench = Bench()
    bench.cycle.disconnected = True
    await bench.whole(200, b"{}")
    assert bench.transport.writes == []


async def test_a_client_that_does_not_read_is_waited_for() -> None:
    bench = Bench()
    bench.flow.write_paused = True
    await bench.whole(200, b"{}")
    assert not bench.flow.write_paused
    assert len(bench.transport.writes) == 1


async def test_one_request_has_one_reply() -> None:
    bench = Bench()
    await bench.whole(200, b"{}")
    with pytest.raises(RuntimeError, match="already"):
        await bench.whole(200, b"{}")
