"""One HTTP exchange with an upstream: a reply's body, or a Fault. Never an exception.

The caller decides what a Fault means (`shared/core/retry.py`); this module only sees to it that every way in which
an exchange can end has one name. Cancelling the task closes the connection, which makes vLLM abort the generation
within tens of milliseconds.
"""

from __future__ import annotations

import asyncio
import errno
from typing import TYPE_CHECKING, Final

import aiohttp

from shared.core.faults import BreakKind, Fault, FaultClass, classify_break, classify_reply, too_large
from shared.core.upstream_protocol import UpstreamProtocol
from workers.upstream.client.dial import Origin
from workers.upstream.client.port import Broken, Exchange

if TYPE_CHECKING:
    from collections.abc import Mapping

    from yarl import URL

    from shared.clock import Clock
    from shared.wire.json_arrays import Body
    from workers.upstream.client.own import UpstreamClient
    from workers.upstream.upstream import Upstream

# What a header may hold, and every id of ours holds: a value with anything else is not sent at all.
_FIT: Final = b"\t" + bytes(range(0x20, 0x7F))
_CONTENT_TYPE: Final = {"Content-Type": "application/json"}
# Most specific first: aiohttp's classes derive from each other.
_BREAKS: Final[tuple[tuple[type[BaseException], BreakKind], ...]] = (
    (aiohttp.ClientConnectorDNSError, BreakKind.DNS),
    (aiohttp.ClientSSLError, BreakKind.TLS),
    (aiohttp.ConnectionTimeoutError, BreakKind.CONNECT_TIMEOUT),
    (aiohttp.ClientConnectorError, BreakKind.CONNECT_REFUSED),
    (TimeoutError, BreakKind.READ_TIMEOUT),
    (aiohttp.ClientPayloadError, BreakKind.BODY_CUT),
    # "Cannot write to closing transport": the pooled connection was gone before a byte of the request went out.
    (aiohttp.ClientConnectionResetError, BreakKind.CLOSED_BEFORE_WRITE),
    (aiohttp.ServerDisconnectedError, BreakKind.RESET_BEFORE_STATUS),
    (aiohttp.ClientOSError, BreakKind.RESET_BEFORE_STATUS),
    (aiohttp.ClientConnectionError, BreakKind.RESET_BEFORE_STATUS),
    (OSError, BreakKind.RESET_BEFORE_STATUS),
)
# A list of models is a few KiB each; what is longer is cut, and then no list.
_LARGEST_ANSWER_BYTES: Final = 16 * 1024 * 1024
# The worker's own limits, not the upstream's fault: it must not be rested for them.
_OUR_OWN: Final = frozenset({errno.EADDRNOTAVAIL, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Forwarder:
    def __init__(
        self,
        client: UpstreamClient,
        questions: aiohttp.ClientSession,
        clock: Clock,
        api_key: str | None = None,
    ) -> None:
        """Samples go through `client`, questions about an upstream through a session of their own."""
        self._client = client
        self._questions = questions
        self._clock = clock
        self._authorization = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        # Of the upstreams, which are the operator's: there are as many as were configured.
        self._targets: dict[URL, tuple[Origin, str]] = {}

    async def post(
        self, upstream: Upstream, url: URL, body: bytes, headers: Mapping[str, str], key_digest: bytes = b""
    ) -> Body | Fault:
        """The body of a 200, or what went wrong. Counted in `upstream.attempts` while it lasts.

        `key_digest`: whose turn it takes where requests wait for a connection, as of `FairQueue`.
        """
        origin, start = self._targets.get(url) or self._target(url)
        exchange = Exchange(self._clock.monotonic_s, key_digest)
        upstream.attempts.add(exchange)
        try:
            reply = await self._client.send(origin, _head(start, headers, len(body)), body, exchange)
        except Broken as broken:
            # Its future is in the frames that its traceback holds: a circle, with the request's body in it.
            return self._broken(upstream, broken.with_traceback(None))
        except asyncio.CancelledError:
            upstream.cut_off(exchange, self._clock.monotonic_s())
            raise
        finally:
            upstream.attempts.discard(exchange)
        upstream.accepted()
        if reply.status != 200:
            protocol = UpstreamProtocol.GENERATE if url is upstream.generate_url else UpstreamProtocol.COMPLETIONS
            return classify_reply(reply.status, reply.body, reply.headers, protocol)
        upstream.answered(exchange, self._clock.monotonic_s())
        return reply.body if reply.whole else too_large()

    async def get(self, upstream: Upstream, url: URL, timeout_s: float) -> bytes | Fault:
        """The body of a 200 to a GET, or what went wrong; `timeout_s` covers all of it."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._questions.get(url, allow_redirects=False, timeout=timeout) as response:
                upstream.accepted()
                return await _told(response)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            self._note_refusal(upstream, getattr(error, "errno", None))
            return fault_of(error, upstream.url)

    async def ask(
        self, upstream: Upstream, url: URL, body: bytes, timeout_s: float, request_id: str | None = None
    ) -> tuple[int, bytes] | Fault:
        """Status and body of whatever is answered to a POST that is no sample; a Fault where nothing is."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        headers = {**_CONTENT_TYPE, "X-Request-Id": request_id} if request_id else _CONTENT_TYPE
        try:
            async with self._questions.post(
                url, data=body, headers=headers, allow_redirects=False, timeout=timeout
            ) as response:
                upstream.accepted()
                return response.status, await _read(response)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            self._note_refusal(upstream, getattr(error, "errno", None))
            return fault_of(error, upstream.url)

    def _target(self, url: URL) -> tuple[Origin, str]:
        assert url.raw_host is not None
        assert url.port is not None
        start = (
            f"POST {url.raw_path_qs} HTTP/1.1\r\nHost: {url.host_port_subcomponent}\r\n"
            f"Content-Type: application/json\r\n{self._authorization}"
        )
        self._targets[url] = target = Origin(url.scheme == "https", url.raw_host, url.port), start
        return target

    def _broken(self, upstream: Upstream, broken: Broken) -> Fault:
        self._note_refusal(upstream, broken.errno)
        if broken.errno in _OUR_OWN:
            return _no_more_connections(broken.detail)
        detail = f"{upstream.url}: {broken.detail}" if broken.detail else upstream.url
        return classify_break(broken.kind, detail)

    def _note_refusal(self, upstream: Upstream, number: int | None) -> None:
        if number == errno.ECONNREFUSED:
            upstream.refused(self._clock.monotonic_s())


def _head(start: str, headers: Mapping[str, str], body_bytes: int) -> bytes:
    if not _is_fit("".join(headers.values())):
        headers = {name: value for name, value in headers.items() if _is_fit(value)}
    told = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    return f"{start}{told}Content-Length: {body_bytes}\r\n\r\n".encode("latin-1")


def _is_fit(value: str) -> bool:
    # Three times as fast as a search for what is not fit.
    return value.isascii() and not value.encode("ascii").translate(None, _FIT)


async def _told(response: aiohttp.ClientResponse) -> bytes | Fault:
    body = await _read(response)
    return body if response.status == 200 else classify_reply(response.status, body, response.headers)


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """The body; what is too large is not read to its end, which closes the connection."""
    parts: list[bytes] = []
    size_bytes = 0
    while size_bytes <= _LARGEST_ANSWER_BYTES and (part := await response.content.readany()):
        parts.append(part)
        size_bytes += len(part)
    return b"".join(parts)


def fault_of(error: BaseException, where: str) -> Fault:
    """The Fault behind an exception of an exchange with `where` (an upstream's URL)."""
    if getattr(error, "errno", None) in _OUR_OWN:
        return _no_more_connections(str(error))
    for kind, name in _BREAKS:
        if isinstance(error, kind):
            return classify_break(name, f"{where}: {error}" if str(error) else where)
    return Fault(FaultClass.AMBIGUOUS, f"{where} did not answer in HTTP: {error}"[:500])


def _no_more_connections(why: str) -> Fault:
    return Fault(FaultClass.NEVER_EXECUTED, f"the gateway cannot open more connections: {why}")
