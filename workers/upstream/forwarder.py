"""One HTTP exchange with an upstream: the body of a reply, or a Fault. Never an exception.

The caller decides what a Fault means (`shared/core/retry.py`); this module gives every way in which an exchange can end
one name. Cancelling the task closes the connection, which makes vLLM abort the generation within tens of milliseconds.
"""

from __future__ import annotations

import asyncio
import errno
from typing import TYPE_CHECKING, Final

import aiohttp

from shared.core.faults import Fault, FaultClass, classify_break, classify_reply, too_large
from shared.core.upstream_protocol import UpstreamProtocol
from shared.core.upstream_text import without_objects
from workers.upstream.client.aiohttp_client import broken_by
from workers.upstream.client.port import Broken, Exchange, Origin

if TYPE_CHECKING:
    from collections.abc import Mapping

    from yarl import URL

    from shared.clock import Clock
    from shared.wire.json_arrays import Body
    from workers.upstream.client.port import UpstreamClient
    from workers.upstream.upstream import Upstream

# The bytes that a header may hold. All ids of ours consist of these; a header with anything else is not sent.
_FIT: Final = b"\t" + bytes(range(0x20, 0x7F))
_CONTENT_TYPE: Final = {"Content-Type": "application/json"}
# A list of models takes a few KiB each. A longer answer is cut, and is then no list.
_LARGEST_ANSWER_BYTES: Final = 16 * 1024 * 1024
# The worker's own limits, for which the upstream must not count as down.
_OUR_OWN: Final = frozenset({errno.EADDRNOTAVAIL, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Forwarder:
    """Sends samples and questions to upstreams."""

    def __init__(
        self,
        client: UpstreamClient,
        questions: aiohttp.ClientSession,
        clock: Clock,
        api_key: str | None = None,
    ) -> None:
        """Send samples through `client`, and questions about an upstream through the session `questions`."""
        self._client = client
        self._questions = questions
        self._clock = clock
        self._authorization = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        # By the URLs of the operator's upstreams, so it is bounded.
        self._targets: dict[URL, tuple[Origin, str]] = {}

    async def post(
        self, upstream: Upstream, url: URL, body: bytes, headers: Mapping[str, str], exchange: Exchange | None = None
    ) -> Body | Fault:
        """Return the body of a 200, or what went wrong. `exchange` is among `upstream.attempts` while it lasts."""
        origin, start = self._targets.get(url) or self._target(url)
        if exchange is None:
            exchange = Exchange(self._clock.monotonic_s)
        upstream.attempts.add(exchange)
        try:
            reply = await self._client.send(origin, _head(start, headers, len(body)), body, exchange)
        except Broken as broken:
            # Its traceback holds frames that hold its future: a reference cycle, with the request's body in it.
            broken.with_traceback(None)
            self._note_refusal(upstream, broken.errno)
            return _fault_of_broken(broken, upstream.url)
        except asyncio.CancelledError:
            upstream.cut_off(exchange, self._clock.monotonic_s())
            raise
        finally:
            upstream.attempts.discard(exchange)
        upstream.accepted()
        if reply.status != 200:
            generates = url is upstream.samples_urls[UpstreamProtocol.GENERATE]
            protocol = UpstreamProtocol.GENERATE if generates else UpstreamProtocol.COMPLETIONS
            return classify_reply(reply.status, reply.body, reply.headers, protocol)
        upstream.answered(exchange, self._clock.monotonic_s())
        return reply.body if reply.whole else too_large()

    async def get(self, upstream: Upstream, url: URL, timeout_s: float) -> bytes | Fault:
        """Return the body of a 200 to a GET, or what went wrong. `timeout_s` covers the whole exchange."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._questions.get(url, allow_redirects=False, timeout=timeout) as response:
                upstream.accepted()
                reply = await _read(response)
                return reply if response.status == 200 else classify_reply(response.status, reply, response.headers)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            self._note_refusal(upstream, getattr(error, "errno", None))
            return fault_of(error, upstream.url)

    async def ask(
        self, upstream: Upstream, url: URL, body: bytes, timeout_s: float, request_id: str | None = None
    ) -> tuple[int, bytes] | Fault:
        """POST something other than a sample, and return status and body of the answer, or a Fault if there is none."""
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

    def _note_refusal(self, upstream: Upstream, number: int | None) -> None:
        if number == errno.ECONNREFUSED:
            upstream.refused(self._clock.monotonic_s())


def _head(start: str, headers: Mapping[str, str], body_bytes: int) -> bytes:
    if not _is_fit("".join(headers.values())):
        headers = {name: value for name, value in headers.items() if _is_fit(value)}
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    return f"{start}{lines}Content-Length: {body_bytes}\r\n\r\n".encode("latin-1")


def _is_fit(value: str) -> bool:
    # Three times as fast as a search for a byte that is not allowed.
    return value.isascii() and not value.encode("ascii").translate(None, _FIT)


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """Return the body. A body above the limit is not read to its end, which closes the connection."""
    parts: list[bytes] = []
    size_bytes = 0
    while size_bytes <= _LARGEST_ANSWER_BYTES and (part := await response.content.readany()):
        parts.append(part)
        size_bytes += len(part)
    return b"".join(parts)


def fault_of(error: BaseException, where: str) -> Fault:
    """Return the Fault behind an exception of aiohttp in an exchange with `where` (an upstream's URL)."""
    return _fault_of_broken(broken_by(error), where)


def _fault_of_broken(broken: Broken, where: str) -> Fault:
    if broken.errno in _OUR_OWN:
        message = "the gateway cannot open more connections"
        return Fault(FaultClass.NEVER_EXECUTED, message, log_text=f"{message}: {without_objects(broken.detail)}")
    return classify_break(broken.kind, where, broken.detail)
