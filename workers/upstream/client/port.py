"""The port to an HTTP client, as the forwarder needs it: one request, its reply, and a way to break it off.

Two adapters implement `UpstreamClient`: `own` and `aiohttp_client`. Nothing outside this folder but the connector,
which makes the chosen one, knows more than this module.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from shared.core.model import Value

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping

    from shared.core.faults import BreakKind
    from shared.wire.json_arrays import Body


# vLLM sends none; 100 and 103 may come of a proxy.
MOST_INTERIM_REPLIES: Final = 10


class Broken(Exception):
    """An exchange that ended without a usable reply. `errno` is the system's, where a system call failed."""

    def __init__(self, kind: BreakKind, detail: str = "", errno: int | None = None) -> None:
        super().__init__(f"{kind.value}: {detail}" if detail else kind.value)
        self.kind = kind
        self.detail = detail
        self.errno = errno


class Origin(NamedTuple):
    """Where connections go. `tls` is set for an https URL."""

    tls: bool
    host: str
    port: int


class Reply(Value, frozen=True):
    """One reply. `headers` have lower-case names and are filled in for statuses other than 200 only.

    `whole` is False when the body was longer than the limit and was cut there.
    """

    status: int
    body: Body
    headers: Mapping[str, str]
    whole: bool = True


class Distrusted(Protocol):
    """A connection, as an exchange sees it."""

    def distrust(self) -> None:
        """Do not use the connection for another request; close it now if it is idle."""


class Exchange:
    """One request, from the moment it waits for a connection. `reply` is set once the request was sent.

    `key_digest` says whose turn it is, as in `FairQueue`. `refusal` looks at the body of a 200 before its connection
    can be used again, and returns why it is not the reply to this request, or None.
    """

    __slots__ = ("_connection", "_refusal", "begun_s", "key_digest", "now_s", "reply", "sent_s")

    def __init__(
        self,
        now_s: Callable[[], float] = time.monotonic,
        key_digest: bytes = b"",
        refusal: Callable[[Body], str | None] | None = None,
    ) -> None:
        self.now_s = now_s
        self.key_digest = key_digest
        self.begun_s = now_s()
        self.sent_s: float | None = None
        self.reply: asyncio.Future[Reply] | None = None
        self._refusal = refusal
        self._connection: Distrusted | None = None

    def sent(self, reply: asyncio.Future[Reply], connection: Distrusted) -> None:
        """Note that the request is on a connection: waiting for one ends here, and the upstream's time begins."""
        self.reply = reply
        self._connection = connection
        self.sent_s = self.now_s()

    def break_off(self, kind: BreakKind) -> None:
        """End the exchange as `kind`, and its connection with it. A request that was not sent yet goes on."""
        if self.reply is not None and not self.reply.done():
            self.reply.set_exception(Broken(kind))

    def refusal(self, reply: Reply) -> str | None:
        """Return why `reply` is not the reply to this request, or None when nothing speaks against it."""
        if self._refusal is None or reply.status != 200 or not reply.whole:
            return None
        return self._refusal(reply.body)

    def distrust(self) -> None:
        """Use the connection of this exchange for no other request: its reply turned out to be wrong."""
        if self._connection is not None:
            self._connection.distrust()


class UpstreamClient(Protocol):
    """Sends requests to upstreams, over connections that it opens, keeps and limits."""

    async def send(self, origin: Origin, head: bytes, body: bytes, exchange: Exchange) -> Reply:
        """Send one request and return its reply. `head` is the whole head, with its empty line.

        Raises `Broken`. Cancelling closes the connection.
        """

    async def close(self) -> None:
        """Close all connections; what runs ends as `Broken`. Send nothing afterwards."""
