"""The client of the training server (`--training-upstream`).

Nothing is sent twice. A request that the server cannot have received becomes a 503, one that it may have executed a
502. The SDK repeats both after a pause, with the same sequence number, as it would without a gateway in between.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

import msgspec
from multidict import CIMultiDict
from yarl import URL

from shared.core.errors import BadRequest, UpstreamBroke, UpstreamUnavailable
from shared.core.faults import FaultClass
from shared.wire import passing
from workers.passing.relay import BROKEN, body_pieces, relay, while_connected
from workers.upstream.forwarder import fault_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    import aiohttp
    from starlette.types import Send

    from shared.http.request import Request
    from shared.wire.passing import Header

log = logging.getLogger(__name__)

# Sessions and promises take some hundred bytes. A reply that is read whole must not fill the worker.
_LARGEST_ANSWER_BYTES: Final = 1024 * 1024
# Below the 60 s that the SDK waits for these.
ANSWER_S: Final = 55.0


@dataclass(frozen=True, slots=True)
class TrainerReply:
    """A whole reply of the training server. `headers` are those that the client may have."""

    status: int
    headers: list[Header]
    body: bytes = field(repr=False)

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One request to the training server."""

    method: str
    target: URL
    headers: CIMultiDict[str]
    body: bytes | AsyncIterator[bytes] | None = field(repr=False)


class TrainingServer:
    """Sends requests to the training server with the operator's `api_key`, or with `forward_key` the client's own."""

    def __init__(
        self, base_url: str, session: aiohttp.ClientSession, *, api_key: str | None = None, forward_key: bool = False
    ) -> None:
        self._base_url = base_url.rstrip("/")
        self._session = session
        self._api_key = api_key
        self._forward_key = forward_key
        # With the digest of each one's caller.
        self._held: dict[asyncio.Timeout, bytes] = {}
        self.in_flight = 0

    # -- requests

    def as_it_comes(self, request: Request) -> Outgoing:
        """Make a request of the client's, whose body is still to be received. Raises `BadRequest`."""
        arriving = request.scope()["headers"]
        has_body = not {b"content-length", b"transfer-encoding"}.isdisjoint(name for name, _ in arriving)
        body = body_pieces(request.receive) if has_body else None
        return Outgoing(request.scope()["method"], self._target(request), self._headers(request), body)

    def whole(self, request: Request, body: bytes | None = None) -> Outgoing:
        """Make a request of the client's with its whole body, or with `body`. Raises `BadRequest`.

        The reply must not be compressed, since it is read here.
        """
        headers = self._headers(request, b"content-length", b"content-encoding", b"accept-encoding")
        sent = request.body if body is None else body
        return Outgoing(request.scope()["method"], self._target(request), headers, sent)

    def sampler(self, request: Request, sampler_id: str) -> Outgoing:
        """Ask, in the name of the client, what a sampling session of the trainer samples from."""
        target = URL(f"{self._base_url}/api/v1/samplers/{quote(sampler_id, safe=':')}", encoded=True)
        headers = self._headers(request, b"content-length", b"content-type", b"content-encoding", b"accept-encoding")
        return Outgoing("GET", target, headers, None)

    def weights(self, request: Request, path: str) -> Outgoing:
        """Ask, in the name of the client, what is known of saved weights."""
        target = URL(f"{self._base_url}/api/v1/weights_info", encoded=True)
        headers = self._headers(request, b"content-length", b"content-encoding", b"accept-encoding")
        return Outgoing("POST", target, headers, msgspec.json.encode({"tinker_path": path}))

    def alive(self, request: Request, session_id: str) -> Outgoing:
        """Ask, in the name of the client, whether there is such a session, by a sign of its life."""
        target = URL(f"{self._base_url}/api/v1/session_heartbeat", encoded=True)
        headers = self._headers(request, b"content-length", b"content-encoding", b"accept-encoding")
        return Outgoing("POST", target, headers, msgspec.json.encode({"session_id": session_id}))

    def _target(self, request: Request) -> URL:
        scope = request.scope()
        path, query = scope["raw_path"], scope["query_string"]
        if not passing.is_plain_target(path, query):
            raise BadRequest("the request's path is not plain: no dot segments, and nothing but visible ASCII")
        target = self._base_url + path.decode()
        return URL(f"{target}?{query.decode()}" if query else target, encoded=True)

    def _headers(self, request: Request, *left_out: bytes) -> CIMultiDict[str]:
        arriving = request.scope()["headers"]
        kept = passing.without(passing.to_trainer(arriving), *left_out)
        headers = CIMultiDict((name.decode(), value.decode()) for name, value in kept)
        key = self._api_key or (passing.api_key(arriving) if self._forward_key else None)
        if key is not None:
            headers["X-API-Key"] = key
        return headers

    # -- exchanges

    @asynccontextmanager
    async def exchange(self, outgoing: Outgoing) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield the reply, whose body is still to be read. The block's end closes the connection unless it was read.

        Raises `UpstreamUnavailable`, `UpstreamBroke`.
        """
        self.in_flight += 1
        try:
            response = await self._open(outgoing)
            try:
                yield response
            finally:
                response.close()
        finally:
            self.in_flight -= 1

    async def _open(self, outgoing: Outgoing) -> aiohttp.ClientResponse:
        try:
            return await self._session.request(
                outgoing.method, outgoing.target, headers=outgoing.headers, data=outgoing.body, allow_redirects=False
            )
        except BROKEN as error:
            raise _trouble(error) from None

    async def pass_on(self, request: Request, outgoing: Outgoing, send: Send) -> None:
        """Send the reply on as it comes. Raises as `exchange` before the first byte, `ClientGone` and `ReplyBroken`."""
        async with while_connected(request.connection), self.exchange(outgoing) as response:
            await relay(response, self.headers_for_client(response), send)

    async def ask(self, request: Request, outgoing: Outgoing, timeout_s: float = ANSWER_S) -> TrainerReply:
        """Return the whole reply. Raises as `exchange`, and `ClientGone`."""
        try:
            async with while_connected(request.connection), asyncio.timeout(timeout_s):
                async with self.exchange(outgoing) as response:
                    return await self.read(response)
        except TimeoutError:
            raise UpstreamBroke(f"the training server did not answer within {timeout_s:g} s") from None

    async def read(self, response: aiohttp.ClientResponse) -> TrainerReply:
        """Read the rest of a reply. Raises `UpstreamBroke`."""
        body = bytearray()
        try:
            while len(body) <= _LARGEST_ANSWER_BYTES and (piece := await response.content.readany()):
                body += piece
        except BROKEN as error:
            raise _trouble(error) from None
        if len(body) > _LARGEST_ANSWER_BYTES:
            raise UpstreamBroke("the training server's answer is larger than any answer to this request should be")
        headers = passing.without(self.headers_for_client(response), b"content-length")
        return TrainerReply(response.status, headers, bytes(body))

    def headers_for_client(self, response: aiohttp.ClientResponse) -> list[Header]:
        return [
            (name, passing.redirect_for_client(value, self._base_url) if name == b"location" else value)
            for name, value in passing.to_client(response.raw_headers)
        ]

    # -- polls

    @asynccontextmanager
    async def held(self, hold_s: float, digest: bytes) -> AsyncIterator[asyncio.Timeout]:
        """Raise `TimeoutError` in the block after `hold_s`, when this worker drains, and when the key is revoked."""
        async with asyncio.timeout(hold_s) as timeout:
            self._held[timeout] = digest
            try:
                yield timeout
            finally:
                self._held.pop(timeout, None)

    def release(self, held: asyncio.Timeout) -> None:
        """Let a poll run to its end: its result has begun to arrive."""
        held.reschedule(None)
        self._held.pop(held, None)

    def send_back(self) -> None:
        """End every held poll now."""
        for timeout in list(self._held):
            timeout.reschedule(0.0)

    def end_revoked(self, knows: Callable[[bytes], bool]) -> None:
        """End the held polls of callers that `knows` does not accept."""
        for timeout, digest in list(self._held.items()):
            if not knows(digest):
                timeout.reschedule(0.0)

    async def close(self) -> None:
        await self._session.close()


def _trouble(error: BaseException) -> UpstreamUnavailable | UpstreamBroke:
    """Return what became of a request, in words that name no address behind the gateway; the log has the address."""
    fault = fault_of(error, "training server")
    log.debug("training server failed", extra={"error": fault.for_operators})
    if fault.kind is FaultClass.NEVER_EXECUTED:
        return UpstreamUnavailable("the training server cannot be reached; send it again later")
    return UpstreamBroke("the training server did not answer; send it again later")
