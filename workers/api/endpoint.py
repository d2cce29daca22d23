"""From a request to a handler and back: who calls, what is refused, one reply, what is counted.

A handler is `async (Request) -> Reply | Streamed` and raises `GatewayError` for everything else; this is the boundary,
the one place that catches all exceptions. shared/http/exchange.py describes how an endpoint is found and called.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Final

from shared.core.errors import ClientGone, GatewayError, Overloaded, ReplyBroken, Unauthorized
from shared.http.exchange import exchange_in
from shared.http.head import is_repeated, require_readable
from shared.http.request import Request
from shared.wire.passing import traceparent_of
from workers.api import replies
from workers.api.replies import Streamed

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from shared.counters import Counters
    from shared.http.exchange import Exchange
    from workers.api.replies import Reply
    from workers.parts import Live

log = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable["Reply | Streamed"]]

_KEY_HEADERS: Final = (b"x-api-key", b"authorization")


class Endpoint:
    """A handler, as the table of hot paths and Starlette's routes hold it."""

    def __init__(
        self,
        handler: Handler,
        live: Live,
        counters: Counters,
        max_body_bytes: int | None = None,
        *,
        public: bool = False,
        streamed: bool = False,
        in_turns: bool = False,
    ) -> None:
        """`max_body_bytes`: the limit of this path, which is never above `--max-body-bytes`; None: that alone.

        `public`: no key is asked for. `streamed`: the handler takes the body as it comes. `in_turns`: requests come in
        crowds, and wait for their turn.
        """
        self._handler = handler
        self._live = live
        self._counters = counters
        self._max_body_bytes = max_body_bytes
        self._public = public
        self._streamed = streamed
        self.in_turns = in_turns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request that Starlette has routed here, as it would call any mounted application."""
        exchange = exchange_in(scope)
        exchange.path_params = scope.get("path_params", {})
        self.admit(exchange)
        await exchange.respond()

    def admit(self, exchange: Exchange) -> None:
        """Decide by the head who calls and whether the body may come, before any of it is kept."""
        self._counters.http_requests += 1
        limit_bytes = None if self._streamed else self._live.settings.max_body_bytes
        if limit_bytes is not None and self._max_body_bytes is not None:
            limit_bytes = min(limit_bytes, self._max_body_bytes)
        try:
            if not self._public:
                exchange.caller = self._live.keyring.identify(self._key_of(exchange))
            if limit_bytes is not None:
                require_readable(exchange.headers, limit_bytes)
        except GatewayError as error:
            self.refuse(exchange, error)
        else:
            exchange.collect(self, limit_bytes)

    async def answer(self, exchange: Exchange, body: bytes) -> Reply | None:
        """Return the handler's reply; None when it was streamed, or there is nobody to reply to."""
        headers = exchange.headers
        trace = headers.get(b"traceparent")
        request = Request(
            exchange.caller,
            body,
            headers.get(b"accept"),
            exchange.peer,
            exchange.path_params,
            exchange.scope,
            exchange.receive,
            traceparent_of(trace) if trace is not None else None,
        )
        try:
            reply = await self._handler(request)
            if isinstance(reply, Streamed):
                await reply.run(exchange.send)
                # Counted once it is over: a reply that breaks off is counted as such.
                self._counters.answered(exchange.status)
                return None
            exchange.hold_reply(len(reply.body))
        except ClientGone:
            self.client_left(exchange)
            return None
        except ReplyBroken as error:
            self._counters.http_server_errors += 1
            log.debug("reply was cut off", extra={"path": exchange.path, "error": str(error)})
            exchange.peer.cut()
            return None
        except Exception as error:
            # The boundary: whatever broke, the client is answered.
            reply = self._refusal_of(error, exchange)
        if reply.status >= 400:
            self._counters.answered(reply.status)
        return reply

    def refuse(self, exchange: Exchange, error: GatewayError) -> None:
        """Reply at once, without waiting for a body."""
        reply = self._refusal_of(error, exchange)
        self._counters.answered(reply.status)
        exchange.reply(reply.status, reply.content_type, reply.body)

    def client_left(self, exchange: Exchange) -> None:
        """Count a request whose client had gone before it was answered."""
        self._counters.http_client_errors += 1
        log.debug("request was cut off", extra={"path": exchange.path})

    def _key_of(self, exchange: Exchange) -> str | None:
        """Return the caller's API key. Raises `Unauthorized` when there may be two.

        Which of two counts would be for each server to say: here the last, for a training server perhaps the first.
        """
        if len(exchange.headers) < len(exchange.header_list):
            for name in _KEY_HEADERS:
                if is_repeated(exchange.header_list, name):
                    raise Unauthorized(f"the request has more than one {name.decode()} header")
        key = self._api_key(exchange.headers)
        return key.decode("latin-1") if key is not None else None

    def _refusal_of(self, error: Exception, exchange: Exchange) -> Reply:
        if not isinstance(error, GatewayError):
            self._counters.rejected_unexpected += 1
            log.error("request failed", exc_info=error, extra={"path": exchange.path})
        elif isinstance(error, Overloaded) and error.reason == "upstream":
            self._counters.rejected_upstream += 1
        return self._refusal(error)

    def _api_key(self, headers: Mapping[bytes, bytes]) -> bytes | None:
        """Return the key from where this API's clients put it."""
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


class FixedReply:
    """An entry of the table of hot paths that gives every caller the same reply."""

    def __init__(self, reply: Reply, counters: Counters) -> None:
        self._reply = reply
        self._counters = counters

    def admit(self, exchange: Exchange) -> None:
        """Reply as soon as the head is read."""
        self._counters.http_requests += 1
        self._counters.answered(self._reply.status)
        exchange.reply(self._reply.status, self._reply.content_type, self._reply.body)
