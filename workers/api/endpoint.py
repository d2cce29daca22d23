"""From a request to a handler and back: who calls, the whole body, one reply, and whether it was delivered.

A handler is `async (Request) -> Reply` and raises `GatewayError` for everything else; this is the boundary, the one
place that catches all exceptions. Requests come as ASGI, or directly from the edge (shared/http/exchange.py).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final

from shared.core.callers import ANONYMOUS
from shared.core.errors import ClientGone, GatewayError, Overloaded, ReplyBroken
from shared.http.exchange import deliver, send_whole
from shared.http.head import read_body, require_readable
from shared.http.peer import connection
from shared.http.request import Request
from shared.wire.passing import traceparent_of
from workers.api import replies
from workers.api.replies import Streamed

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from shared.core.callers import Caller, Keyring
    from shared.counters import Counters
    from shared.http.exchange import DirectCycle
    from shared.loop.turns import TurnLimit
    from workers.api.replies import Reply

log = logging.getLogger(__name__)


Handler = Callable[[Request], Awaitable["Reply | Streamed"]]


_NO_PATH: Final[dict[str, str]] = {}


class Endpoint:
    """A handler as an ASGI application, and as what answers without: `direct.Direct`.

    Starlette routes to it as it would to any mounted app.
    """

    def __init__(
        self,
        handler: Handler,
        keyring: Callable[[], Keyring],
        counters: Counters,
        max_body_bytes: Callable[[], int],
        *,
        public: bool = False,
        streamed: bool = False,
        turns: TurnLimit | None = None,
    ) -> None:
        """`streamed`: the handler takes the body as it comes. `turns`: requests come in crowds, and wait for theirs."""
        self._handler = handler
        self._keyring = keyring
        self._counters = counters
        self._max_body_bytes = max_body_bytes
        self._public = public
        self._streamed = streamed
        self._turns = turns

    # -- as an ASGI application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._counters.http_requests += 1
        await self._serve(scope, send, self._received(scope, receive))

    async def _received(self, scope: Scope, receive: Receive) -> Reply | Streamed:
        headers = dict(scope["headers"])
        # Before the body is read: a stranger cannot make us hold bytes.
        caller = self._caller(headers)
        if self._turns is not None:
            await self._turns.wait(caller.digest)
        body = b"" if self._streamed else await read_body(headers, receive, self._max_body_bytes())
        return await self._handler(
            Request(
                caller,
                body,
                headers.get(b"accept"),
                connection(scope),
                scope.get("path_params", _NO_PATH),
                lambda: scope,
                receive,
                traceparent_of(headers.get(b"traceparent")),
            )
        )

    async def _serve(self, scope: Scope, send: Send, coming: Awaitable[Reply | Streamed]) -> None:
        try:
            reply = await coming
            if isinstance(reply, Streamed):
                await self._run(reply, send)
                return
        except ClientGone:
            self.client_left(scope["path"])
            return
        except ReplyBroken as error:
            self._counters.http_server_errors += 1
            log.debug("reply was cut off", extra={"path": scope["path"], "error": str(error)})
            await connection(scope).cut()
            return
        except Exception as error:
            # The boundary: whatever broke, the client is answered.
            reply = self._refused(error, scope["path"])
        await self._send(scope, send, reply)

    async def _run(self, reply: Streamed, send: Send) -> None:
        """Another server's status is told once its reply is over: one that breaks off is counted as such."""
        status = 200

        async def watched(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        await reply.run(watched)
        self._counters.answered(status)

    async def _send(self, scope: Scope, send: Send, reply: Reply) -> None:
        self._counters.answered(reply.status)
        headers = [(b"content-type", reply.content_type)]
        if reply.on_delivered is None:
            await send_whole(scope, send, reply.status, headers, reply.body)
        elif await deliver(scope, send, reply.status, headers, reply.body):
            reply.on_delivered()

    # -- as a direct one (shared/http/exchange.py)

    def admit(self, headers: Mapping[bytes, bytes]) -> Caller:
        self._counters.http_requests += 1
        caller = self._caller(headers)
        require_readable(headers, self._max_body_bytes())
        return caller

    async def answered(self, request: DirectCycle) -> Reply | ASGIApp:
        try:
            headers = request.headers
            reply = await self._handler(
                Request(
                    request.caller,
                    request.body,
                    headers.get(b"accept"),
                    request.connection,
                    _NO_PATH,
                    request.scope,
                    _nothing_more,
                    traceparent_of(headers.get(b"traceparent")),
                )
            )
        except Exception as error:
            # The same boundary. What breaks a reply off comes from one that was begun.
            reply = self._refused(error, request.path)
        if isinstance(reply, Streamed):
            return partial(self._stream, reply)
        self._counters.answered(reply.status)
        return reply

    def refused(self, error: GatewayError, path: str) -> Reply:
        reply = self._refused(error, path)
        self._counters.answered(reply.status)
        return reply

    def client_left(self, path: str) -> None:
        self._counters.http_client_errors += 1
        log.debug("request was cut off", extra={"path": path})

    async def _stream(self, reply: Streamed, scope: Scope, receive: Receive, send: Send) -> None:
        await self._serve(scope, send, _ready(reply))

    # -- both

    def _caller(self, headers: Mapping[bytes, bytes]) -> Caller:
        """Raises `Unauthorized`."""
        return ANONYMOUS if self._public else self._keyring().identify(_text(self._api_key(headers)))

    def _refused(self, error: Exception, path: str) -> Reply:
        if not isinstance(error, GatewayError):
            self._counters.rejected_unexpected += 1
            log.error("request failed", exc_info=error, extra={"path": path})
        elif isinstance(error, Overloaded) and error.reason == "upstream":
            self._counters.rejected_upstream += 1
        return self._refusal(error)

    def _api_key(self, headers: Mapping[bytes, bytes]) -> bytes | None:
        """Where this API's clients put it; names are in lower case."""
        return headers.get(b"x-api-key")

    def _refusal(self, error: Exception) -> Reply:
        return replies.refusal(error)


class OpenAiEndpoint(Endpoint):
    """The same for OpenAI's clients: a bearer token is the key, and errors have their form."""

    def _api_key(self, headers: Mapping[bytes, bytes]) -> bytes | None:
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        return token.strip() if scheme.lower() == b"bearer" else super()._api_key(headers)

    def _refusal(self, error: Exception) -> Reply:
        return replies.openai_refusal(error)


class StandingReply:
    """Always the same reply, whoever asks: `direct.Standing`."""

    def __init__(self, reply: Reply, counters: Counters) -> None:
        self._reply = reply
        self._counters = counters

    def reply(self) -> Reply:
        self._counters.http_requests += 1
        self._counters.answered(self._reply.status)
        return self._reply


async def _nothing_more() -> Message:
    return {"type": "http.disconnect"}


async def _ready(reply: Streamed) -> Streamed:
    return reply


def _text(value: bytes | None) -> str | None:
    return value.decode("latin-1") if value is not None else None
