"""Adapter of the client port to aiohttp: a second opinion, and a way out should our own client ever misbehave.

It costs 2.5 to 2.9 times as much CPU for a request (docs/performance.md). What it cannot do:

- Requests that wait for a connection are served in the order in which they came: keys take no turns.
- The limits count connections in use; idle ones to other upstreams come on top of them, until their keep-alive ends.
- A long body is collected in pieces and joined, so it is in memory twice for a moment.
"""

from __future__ import annotations

import asyncio
import io
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from shared.core.faults import BreakKind
from workers.upstream.client.port import Broken, Reply

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Callable
    from types import SimpleNamespace

    from workers.upstream.client.aiohttp_connector import ExclusiveConnector, ExclusiveHandler
    from workers.upstream.client.dial import Resolve
    from workers.upstream.client.port import Exchange, Origin

# The most specific first: aiohttp's classes derive from each other.
_BREAKS: Final[tuple[tuple[type[BaseException], BreakKind], ...]] = (
    (aiohttp.ClientConnectorDNSError, BreakKind.DNS),
    (aiohttp.ClientSSLError, BreakKind.TLS),
    (aiohttp.ConnectionTimeoutError, BreakKind.CONNECT_TIMEOUT),
    (aiohttp.ClientConnectorError, BreakKind.CONNECT_REFUSED),
    (TimeoutError, BreakKind.READ_TIMEOUT),
    (aiohttp.ClientPayloadError, BreakKind.BODY_CUT),
    # "Cannot write to closing transport": the pooled connection ended before a byte of the request went out.
    (aiohttp.ClientConnectionResetError, BreakKind.CLOSED_BEFORE_WRITE),
    (aiohttp.ServerDisconnectedError, BreakKind.RESET_BEFORE_STATUS),
    (aiohttp.ClientOSError, BreakKind.RESET_BEFORE_STATUS),
    (aiohttp.ClientConnectionError, BreakKind.RESET_BEFORE_STATUS),
    (OSError, BreakKind.RESET_BEFORE_STATUS),
    # A name that cannot be put to a name service at all.
    (UnicodeError, BreakKind.DNS),
)
_WRITTEN_AT_ONCE_BYTES: Final = 64 * 1024
# All that aiohttp raises when an exchange fails.
_ERRORS: Final = (aiohttp.ClientError, OSError, ValueError)


def broken_by(error: BaseException) -> Broken:
    """Return what an exception of aiohttp means for an exchange."""
    kind = next((kind for known, kind in _BREAKS if isinstance(error, known)), BreakKind.NOT_HTTP)
    # What aiohttp adds for a connection that failed repeats the address.
    text = str(error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error)
    return Broken(kind, text, getattr(error, "errno", None))


class AiohttpClient:
    """Implements `UpstreamClient`. The limits on connections are the connector's."""

    def __init__(
        self,
        connector: ExclusiveConnector,
        timeout: aiohttp.ClientTimeout,
        tls: Callable[[], ssl.SSLContext],
        attempt_timeout_s: float,
        largest_reply_bytes: int,
    ) -> None:
        """Send requests over `connector`. `tls` makes the context of https connections.

        `attempt_timeout_s` bounds a request until its reply ends. A longer body than `largest_reply_bytes` is cut.
        """
        sending = aiohttp.TraceConfig()
        sending.on_request_headers_sent.append(_note_sent)
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            response_class=_HeldResponse,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            timeout=timeout,
            trace_configs=[sending],
            trust_env=False,
        )
        self._tls = tls
        self._attempt_timeout_s = attempt_timeout_s
        self._largest_reply_bytes = largest_reply_bytes
        self._running: set[asyncio.Task[Reply]] = set()

    async def send(self, origin: Origin, head: bytes, body: bytes, exchange: Exchange) -> Reply:
        """Send one request and return its reply; see `UpstreamClient`."""
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        sending = _Sending(exchange, reply, self._attempt_timeout_s)
        request = asyncio.create_task(self._request(origin, head, body, sending))
        self._running.add(request)
        request.add_done_callback(self._running.discard)
        request.add_done_callback(partial(_hand_over, reply))
        try:
            return await reply
        finally:
            sending.end()
            request.cancel()

    async def close(self) -> None:
        for request in self._running:
            request.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._session.close()

    async def _request(self, origin: Origin, head: bytes, body: bytes, sending: _Sending) -> Reply:
        method, url, headers = _taken_apart(origin, head)
        response = None
        try:
            response = await self._session.request(
                method,
                url,
                # aiohttp writes a file in pieces, and bytes in one go.
                data=body if len(body) <= _WRITTEN_AT_ONCE_BYTES else io.BytesIO(body),
                headers=headers,
                allow_redirects=False,
                ssl=self._tls() if origin.tls else True,
                trace_request_ctx=sending,
            )
            reply = await self._read(response)
            assert response.connection is not None
            sending.handler = response.connection.protocol  # type: ignore[assignment] # of an ExclusiveConnector
            if (why := sending.exchange.refusal(reply)) is not None:
                raise Broken(BreakKind.ANOTHERS_REPLY, why)
            if reply.whole:
                response.release()
            return reply
        except _ERRORS as error:
            raise broken_by(error) from None
        finally:
            if response is not None:
                response.close()

    async def _read(self, response: aiohttp.ClientResponse) -> Reply:
        parts: list[bytes] = []
        left_bytes = self._largest_reply_bytes
        while left_bytes >= 0 and (part := await response.content.readany()):
            parts.append(part)
            left_bytes -= len(part)
        headers = {name.lower(): value for name, value in response.headers.items()} if response.status != 200 else {}
        return Reply(response.status, b"".join(parts), headers, left_bytes >= 0)


class GivenNames(AbstractResolver):
    """Lets aiohttp ask `resolve` for the addresses of a name."""

    def __init__(self, resolve: Resolve) -> None:
        self._resolve = resolve

    async def resolve(self, host: str, port: int = 0, family: socket.AddressFamily = 0) -> list[ResolveResult]:  # type: ignore[assignment] # as in aiohttp
        found = await self._resolve(host, port)
        return [
            ResolveResult(hostname=host, host=address[0], port=port, family=kind, proto=protocol, flags=0)
            for kind, _, protocol, _, address in found
        ]

    async def close(self) -> None: ...


class _HeldResponse(aiohttp.ClientResponse):
    """Keeps its connection after the last byte, until `release` or `close`: the reply is looked at before."""

    def _response_eof(self) -> None: ...


class _Sending:
    """A request as aiohttp's trace hands it back, and its connection once the reply is there."""

    def __init__(self, exchange: Exchange, reply: asyncio.Future[Reply], timeout_s: float) -> None:
        self.exchange = exchange
        self._reply = reply
        self._timeout_s = timeout_s
        self._deadline: asyncio.TimerHandle | None = None
        self.handler: ExclusiveHandler | None = None

    def begin(self) -> None:
        """Note that the request is on a connection."""
        self.exchange.sent(self._reply, self)
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(self._timeout_s, self.exchange.break_off, BreakKind.READ_TIMEOUT)

    def end(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()

    def distrust(self) -> None:
        if self.handler is not None:
            self.handler.distrust()


async def _note_sent(_session: aiohttp.ClientSession, context: SimpleNamespace, _headers: Any) -> None:
    sending: _Sending = context.trace_request_ctx
    sending.begin()


def _hand_over(reply: asyncio.Future[Reply], request: asyncio.Task[Reply]) -> None:
    error = Broken(BreakKind.RESET_BEFORE_STATUS, "the gateway stops") if request.cancelled() else request.exception()
    if reply.done():
        return
    if error is not None:
        reply.set_exception(error)
    else:
        reply.set_result(request.result())


def _taken_apart(origin: Origin, head: bytes) -> tuple[str, URL, list[tuple[str, str]]]:
    """Return method, URL and headers of a request's head."""
    start, *lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    method, path, _ = start.split(" ")
    host = f"[{origin.host}]" if ":" in origin.host else origin.host
    url = URL(f"{'https' if origin.tls else 'http'}://{host}:{origin.port}{path}", encoded=True)
    return method, url, [(name, value) for name, _, value in (line.partition(": ") for line in lines)]
