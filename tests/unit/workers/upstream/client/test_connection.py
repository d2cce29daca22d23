"""A reply is the same however its bytes arrive; most of a long one is read into its place, past the parser."""

from __future__ import annotations

import asyncio
import mmap
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.core.faults import BreakKind
from workers.upstream.client.connection import UpstreamConnection
from workers.upstream.client.port import Broken

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from workers.upstream.client.port import Reply

LONG: Final = bytes(range(256)) * 600
LONGER: Final = LONG * 50 + b"end"
LIMIT_BYTES: Final = 400_000
LARGE_LIMIT_BYTES: Final = 256 * 1024 * 1024
SCRATCH_BYTES: Final = 50_000
KEPT: Final = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"
CLOSED: Final = b"HTTP/1.1 200 OK\r\nConnection: close\r\nCONTENT-LENGTH: %d\r\n\r\n"
CHUNKED: Final = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


class Wire(asyncio.Transport):
    """Takes whatever is written, and says when it was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = False

    def write(self, data: object) -> None: ...

    def abort(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("data", "most_reads"),
    [
        # A header without end, which a parser collects, and many short ones.
        (b"HTTP/1.1 200 OK\r\nA: " + b"x" * 1_000_000, 9),
        (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 100_000, 9),
        # Chunks of two bytes cost thirty times as much memory as they hold.
        (CHUNKED + b"2\r\nxy\r\n" * 300_000, 16),
        (b"HTTP/1.1 103 Early Hints\r\n\r\n" * 100_000, 1),
    ],
    ids=["header", "headers", "chunks", "interim replies"],
)
async def test_a_reply_without_end_is_given_up_early(data: bytes, most_reads: int) -> None:
    line = Line(sizes_of([10_000]))
    reply = line.connection.start(b"", b"")
    reads = 0
    while not reply.done():
        line.arrives(data[10_000 * reads : 10_000 * (reads + 1)])
        reads += 1
    with pytest.raises(Broken) as caught:
        await reply
    assert caught.value.kind is BreakKind.NOT_HTTP
    assert reads <= most_reads


class Line:
    """A connection, and what its peer sends, in pieces of the sizes that are given."""

    def __init__(self, sizes: Iterator[int], limit_bytes: int = LIMIT_BYTES) -> None:
        scratch = memoryview(bytearray(SCRATCH_BYTES))
        self.connection = UpstreamConnection(asyncio.get_running_loop(), scratch, limit_bytes, lambda _: None)
        self.connection.connection_made(Wire())
        self._sizes = sizes

    def arrives(self, data: bytes, *, reads_on: bool = True) -> None:
        """`reads_on`: as a transport does, which reads until nothing comes."""
        left = memoryview(data)
        while left and self.connection.is_open:
            buffer = self.connection.get_buffer(-1)
            size = min(next(self._sizes), len(buffer), len(left))
            buffer[:size] = left[:size]
            self.connection.buffer_updated(size)
            del buffer
            left = left[size:]
        if reads_on:
            self.connection.get_buffer(-1)

    def reply(self, data: bytes) -> Reply:
        told = self.connection.start(b"", b"")
        self.arrives(data)
        return told.result()


def sizes_of(pieces: Sequence[int]) -> Iterator[int]:
    """These, then the last one for ever."""
    yield from pieces
    while True:
        yield pieces[-1]


def chunked(body: bytes, size: int) -> bytes:
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    return CHUNKED + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


@given(st.lists(st.integers(1, 2 * SCRATCH_BYTES), min_size=1, max_size=6).filter(lambda sizes: sizes[-1] > 1_000))
def test_the_pieces_do_not_matter(pieces: list[int]) -> None:
    async def talk() -> None:
        line = Line(sizes_of(pieces))
        for body in (LONG, b"{}", LONG[:70_000], b"", LONG):
            for whole in (KEPT % len(body) + body, chunked(body, 60_000)):
                reply = line.reply(whole)
                assert (reply.status, bytes(reply.body), reply.whole) == (200, body, True)
                assert line.connection.is_reusable
        assert line.reply(CLOSED % len(LONG) + LONG).body == LONG
        assert not line.connection.is_reusable

    asyncio.run(talk())


@pytest.mark.parametrize("piece_bytes", [50_000, 2**22])
async def test_a_long_body_is_there_once(piece_bytes: int) -> None:
    """Not copied, and left to who asked: an idle connection that held on to it would keep megabytes."""
    told = KEPT % len(LONGER) + LONGER
    line = Line(sizes_of([piece_bytes]), LARGE_LIMIT_BYTES)
    tracemalloc.start()
    try:
        assert line.reply(told).body == LONGER
        kept_bytes, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept_bytes < len(LONGER) // 10
    assert peak_bytes < len(LONGER) * 3 // 2
    assert line.connection.is_reusable
    assert line.reply(told).body == LONGER


async def test_a_long_body_is_told_without_another_read() -> None:
    line = Line(sizes_of([SCRATCH_BYTES]))
    told = line.connection.start(b"", b"")
    line.arrives(KEPT % len(LONG) + LONG, reads_on=False)
    assert not told.done()
    assert (await told).body == LONG
    assert line.connection.is_reusable


async def test_a_long_body_is_whole_when_its_connection_ends_with_it() -> None:
    line = Line(sizes_of([SCRATCH_BYTES]))
    told = line.connection.start(b"", b"")
    line.arrives(KEPT % len(LONG) + LONG, reads_on=False)
    line.connection.connection_lost(None)
    assert told.result().body == LONG
    assert not line.connection.is_reusable
    # What was put off finds nothing to do.
    await asyncio.sleep(0)


async def test_nobody_waits_any_more_for_a_long_body() -> None:
    line = Line(sizes_of([SCRATCH_BYTES]))
    told = line.connection.start(b"", b"")
    line.arrives(KEPT % len(LONG) + LONG, reads_on=False)
    line.connection.fail(Broken(BreakKind.READ_TIMEOUT))
    await asyncio.sleep(0)
    line.connection.connection_lost(None)
    with pytest.raises(Broken):
        told.result()


async def test_a_length_that_is_only_told_takes_no_memory() -> None:
    """A reply may break off, or never come: memory follows what has arrived."""
    line = Line(sizes_of([SCRATCH_BYTES]), LARGE_LIMIT_BYTES)
    line.connection.start(b"", b"")
    before_bytes = resident_bytes()
    line.arrives(KEPT % LARGE_LIMIT_BYTES + LONG)
    assert resident_bytes() - before_bytes < 8 * 1024 * 1024


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize("piece_bytes", [3_000, SCRATCH_BYTES])
@pytest.mark.parametrize("head", [KEPT % (LIMIT_BYTES + 1), CHUNKED + b"%x\r\n" % (LIMIT_BYTES + 1)])
async def test_what_is_longer_than_the_limit_is_cut(head: bytes, piece_bytes: int) -> None:
    line = Line(sizes_of([piece_bytes]))
    reply = line.reply(head + bytes(LIMIT_BYTES + 1))
    assert not reply.whole
    assert len(reply.body) > LIMIT_BYTES
    assert not line.connection.is_reusable


@pytest.mark.parametrize("more", [b"x", KEPT % 2 + b"{}"])
async def test_what_follows_a_long_body_ends_its_connection(more: bytes) -> None:
    line = Line(sizes_of([SCRATCH_BYTES]))
    assert line.reply(KEPT % len(LONG) + LONG + more).body == LONG
    assert not line.connection.is_reusable


async def test_a_long_body_that_is_cut_is_broken() -> None:
    line = Line(sizes_of([SCRATCH_BYTES]))
    told = line.connection.start(b"", b"")
    line.arrives(KEPT % len(LONG) + LONG[:-1])
    line.connection.connection_lost(None)
    with pytest.raises(Broken, match="cut"):
        told.result()
