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
from shared.core.result import LARGEST_RESULT_BYTES
from workers.upstreams import Attempt

if TYPE_CHECKING:
    from collections.abc import Mapping

    from yarl import URL

    from shared.clock import Clock
    from workers.upstreams import Upstream

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
# The worker's own limits, not the upstream's fault: it must not be rested for them.
_OUR_OWN: Final = frozenset({errno.EADDRNOTAVAIL, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Forwarder:
    def __init__(
        self, session: aiohttp.ClientSession, clock: Clock, probe_session: aiohttp.ClientSession | None = None
    ) -> None:
        """`probe_session` is for `get`; without it both share one."""
        self._session = session
        self._probe_session = probe_session or session
        self._clock = clock

    async def post(self, upstream: Upstream, url: URL, body: bytes, headers: Mapping[str, str]) -> bytes | Fault:
        """The body of a 200, or what went wrong. Counted in `upstream.attempts` while it lasts."""
        task = asyncio.current_task()
        assert task is not None
        attempt = Attempt(task)
        upstream.attempts.add(attempt)
        try:
            return await self._exchange(upstream, url, body, headers)
        except asyncio.CancelledError:
            # A cancel of the sample may have come in the same turn: it is the one that counts.
            if attempt.broken is None or task.uncancel():
                raise
            return classify_break(attempt.broken, upstream.url)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return self._fault(upstream, error)
        finally:
            upstream.attempts.discard(attempt)

    async def get(self, upstream: Upstream, url: URL, timeout_s: float) -> bytes | Fault:
        """The body of a 200 to a GET, or what went wrong; `timeout_s` covers all of it."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._probe_session.get(url, allow_redirects=False, timeout=timeout) as response:
                upstream.accepted()
                return await _outcome(response)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return self._fault(upstream, error)

    async def _exchange(self, upstream: Upstream, url: URL, body: bytes, headers: Mapping[str, str]) -> bytes | Fault:
        async with self._session.post(
            url, data=body, headers={**headers, **_CONTENT_TYPE}, allow_redirects=False
        ) as response:
            upstream.accepted()
            return await _outcome(response)

    def _fault(self, upstream: Upstream, error: BaseException) -> Fault:
        if getattr(error, "errno", None) == errno.ECONNREFUSED:
            upstream.refused(self._clock.monotonic_s())
        return fault_of(error, upstream.url)


async def _outcome(response: aiohttp.ClientResponse) -> bytes | Fault:
    """The body of a 200; what is too large is not read to its end, which closes the connection."""
    declared_bytes = response.content_length
    if declared_bytes is not None and declared_bytes <= LARGEST_RESULT_BYTES:
        body = await response.read()
    else:
        body = await _read_at_most(response, LARGEST_RESULT_BYTES + 1)
    if response.status != 200:
        return classify_reply(response.status, body, response.headers)
    return body if len(body) <= LARGEST_RESULT_BYTES else too_large()


async def _read_at_most(response: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
    parts: list[bytes] = []
    size_bytes = 0
    while size_bytes < limit_bytes and (part := await response.content.readany()):
        parts.append(part)
        size_bytes += len(part)
    return b"".join(parts)


def fault_of(error: BaseException, where: str) -> Fault:
    """The Fault behind an exception of an exchange with `where` (an upstream's URL)."""
    if getattr(error, "errno", None) in _OUR_OWN:
        return Fault(FaultClass.NEVER_EXECUTED, f"the gateway cannot open more connections: {error}")
    for kind, name in _BREAKS:
        if isinstance(error, kind):
            return classify_break(name, f"{where}: {error}" if str(error) else where)
    return Fault(FaultClass.AMBIGUOUS, f"{where} did not answer in HTTP: {error}"[:500])
