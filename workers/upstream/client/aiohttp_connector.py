"""aiohttp's connection pool, made safe for replies that nobody asked for.

aiohttp keeps an idle connection's parser: a second reply to one request waits in it, and becomes the reply to the next
request, which may be another tenant's. Here a connection is reused only if nothing arrived since its last reply ended.

The hooks are aiohttp's internals (`_get`, `_release`, `_factory`, the parser); `tests/hostile` fails if they change.
"""

from __future__ import annotations

import select
from functools import partial
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp.client_proto import ResponseHandler

if TYPE_CHECKING:
    from aiohttp.client_reqrep import ConnectionKey
    from aiohttp.connector import Connection
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
