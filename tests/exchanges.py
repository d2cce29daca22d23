"""Requests through the edge without a socket: parsed from their bytes, answered into a buffer."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from shared.clock import ManualClock
from shared.http.exchange import Exchange, Service
from shared.http.head import HttpLimits, RequestParser
from shared.http.peer import Connection, Flow
from shared.loop.turns import TurnLimit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.types import ASGIApp, Receive, Scope, Send

    from shared.http.exchange import HotEntry
    from shared.http.memory import Memory

PER_TURN = 16


class RecordingTransport(asyncio.Transport):
    """Keeps what is written. Pieces that arrive are cut where a test says, not where a kernel does."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.reading = True
        self.closed = False

    @property
    def written(self) -> bytes:
        return b"".join(self.writes)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(bytes(data))

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def can_write_eof(self) -> bool:
        return False

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True


@dataclass(frozen=True)
class Answered:
    """What was written. `status` is 0 when nothing was."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def nothing(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError("no application serves this")


def service_of(
    app: ASGIApp = nothing,
    hot: Mapping[tuple[bytes, bytes], HotEntry] | None = None,
    memory: Memory | None = None,
) -> Service:
    return Service(app, asyncio.get_running_loop(), TurnLimit(PER_TURN), hot or {}, memory=memory)


class FakeCarrier:
    """A client connection that brings one request: a `Carrier` and a `RequestSink`."""

    client: tuple[str, int] | None = None

    def __init__(self, service: Service, peer: Connection | None = None) -> None:
        self.service = service
        self.transport: Any = RecordingTransport()
        self.flow = Flow(cast("asyncio.Transport", self.transport), ManualClock().monotonic_s)
        self.peer = peer or Connection()
        self.exchange: Exchange | None = None
        self.completed = asyncio.Event()
        self._parser = RequestParser(self, HttpLimits())

    def feed(self, data: bytes) -> None:
        self._parser.feed(data)

    def request_begins(self) -> None:
        self.exchange = Exchange(self, self._parser, keep_alive=True)
        self.exchange.begin()

    def body_arrives(self, part: bytes) -> None:
        assert self.exchange is not None
        if not self.exchange.complete:
            self.exchange.add(part)

    def request_ends(self) -> None:
        assert self.exchange is not None
        if not self.exchange.complete:
            self.exchange.end_body()

    def reply_complete(self) -> None:
        self.completed.set()

    async def answered(self) -> Answered:
        """What is written in the end; a client that has gone gets nothing."""
        waiting = asyncio.ensure_future(self.completed.wait())
        while not self.completed.is_set() and not (self.exchange and self.exchange.gone and not self.service.tasks):
            await asyncio.wait([waiting, *self.service.tasks], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self.service.tasks:
            # Until the reply was delivered, or not.
            await asyncio.wait(self.service.tasks)
        return parse_reply(self.transport.written)


def parse_reply(data: bytes) -> Answered:
    if not data:
        return Answered(0, {}, b"")
    head, _, body = data.partition(b"\r\n\r\n")
    status, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return Answered(int(status.split(" ")[1]), headers, body)


def request_bytes(method: str, path: str, headers: list[tuple[bytes, bytes]], body: bytes = b"") -> bytes:
    if body or method in ("POST", "PUT"):
        headers = [*headers, (b"content-length", b"%d" % len(body))]
    lines = [f"{method} {path} HTTP/1.1\r\nhost: h".encode(), *(b": ".join(header) for header in headers), b"", b""]
    return b"\r\n".join(lines) + body
