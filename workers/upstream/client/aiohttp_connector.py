"""aiohttp's connection pool, made safe for replies that nobody asked for.

aiohttp keeps an idle connection's parser: a second reply to one request waits in it, and becomes the reply to the next
request, which may be another tenant's. Here a connection is reused only if nothing arrived since its last reply ended.

The hooks are aiohttp's internals (`_get`, `_release`, `_factory`, `feed_data`, the parser); `tests/hostile` fails if
they change.
"""

from __future__ import annotations

import select
from functools import partial
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.http_exceptions import HttpProcessingError

from workers.upstream.client.port import MOST_INTERIM_REPLIES

if TYPE_CHECKING:
    from aiohttp import StreamReader
    from aiohttp.client_reqrep import ConnectionKey
    from aiohttp.connector import Connection
    from aiohttp.http_parser import RawResponseMessage
    from aiohttp.tracing import Trace


class ExclusiveConnector(aiohttp.TCPConnector):
    """Keeps connections for reuse, and closes each on which anything arrived while it was idle."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._factory = partial(ExclusiveHandler, loop=self._loop)  # type: ignore[assignment] # of a subclass

    async def _get(self, key: ConnectionKey, traces: list[Trace]) -> Connection | None:
        while (connection := await super()._get(key, traces)) is not None:
            handler = connection.protocol
            assert isinstance(handler, ExclusiveHandler)
            if handler.reuse():
                return connection
            connection.close()
        return None

    def _release(self, key: ConnectionKey, protocol: ResponseHandler, *, should_close: bool = False) -> None:
        assert isinstance(protocol, ExclusiveHandler)
        protocol.is_idle = True
        super()._release(key, protocol, should_close=should_close)


class ExclusiveHandler(ResponseHandler):
    """One connection. `is_idle` from the end of a reply to the next request."""

    is_idle = False
    _interim_replies = 0

    def set_response_params(self, **options: Any) -> None:
        self._interim_replies = 0
        super().set_response_params(**options)

    def feed_data(self, data: tuple[RawResponseMessage, StreamReader], size: int = 0) -> None:
        """Take the head of a reply, unless no client of ours can be sent it: then the exchange ends."""
        status = data[0].code
        # aiohttp reads on and on without looking at its deadlines while interim replies come; it takes 101 for final.
        self._interim_replies += status < 200
        if self._interim_replies <= MOST_INTERIM_REPLIES and status != 101 and status < 600:
            super().feed_data(data, size)
        elif not self.is_eof():
            # In this order: `abort` forgets the exception.
            self.abort()
            self.set_exception(HttpProcessingError(code=status, message=f"a reply of status {status}, unasked for"))

    def data_received(self, data: bytes) -> None:
        # aiohttp calls this with nothing to resume its parser.
        if data and self.is_idle:
            self.abort()
        else:
            super().data_received(data)

    def reuse(self) -> bool:
        """Take the connection for a request; return False if anything arrived behind the last reply."""
        if self.should_close or self._began_another_reply() or self._has_unread_bytes():
            return False
        self.is_idle = False
        return True

    def distrust(self) -> None:
        """Do not use the connection for another request; close it now if it is idle."""
        self.force_close()
        if self.is_idle:
            self.abort()

    def _began_another_reply(self) -> bool:
        """Ask the parser of the last reply, which has seen all that came in the same read as that reply's end."""
        if self._parser is None:
            return True
        try:
            return self._parser.feed_eof() is not None
        except Exception:  # whatever the parser makes of the beginning of a reply
            return True

    def _has_unread_bytes(self) -> bool:
        """Return whether the kernel holds bytes, or the end of the connection, that the loop has not seen."""
        unread = select.poll()
        assert self.transport is not None
        unread.register(self.transport.get_extra_info("socket").fileno(), select.POLLIN)
        return bool(unread.poll(0))
