"""One request and its reply, as the two sides of the client see it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from shared.core.model import Value

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping

    from shared.core.faults import BreakKind
    from shared.wire.json_arrays import Body


class Broken(Exception):
    """An exchange that ended without a whole reply. `errno` is the system's, where it was the system that said no."""

    def __init__(self, kind: BreakKind, detail: str = "", errno: int | None = None) -> None:
        super().__init__(f"{kind.value}: {detail}" if detail else kind.value)
        self.kind = kind
        self.detail = detail
        self.errno = errno


class Reply(Value, frozen=True):
    """`headers` have lower-case names, and are told of other statuses than 200 only: nobody asks for the others.

    `whole` is False when the body was longer than the limit, and was cut there.
    """

    status: int
    body: Body
    headers: Mapping[str, str]
    whole: bool = True


class Exchange:
    """One request, from the moment it waits for a connection. `reply` is there as soon as it was sent.

    `key_digest`: whose it is, as of `FairQueue`.
    """

    __slots__ = ("begun_s", "key_digest", "now_s", "reply", "sent_s")

    def __init__(self, now_s: Callable[[], float] = time.monotonic, key_digest: bytes = b"") -> None:
        self.now_s = now_s
        self.key_digest = key_digest
        self.begun_s = now_s()
        self.sent_s: float | None = None
        self.reply: asyncio.Future[Reply] | None = None

    def sent(self, reply: asyncio.Future[Reply]) -> None:
        """It has a connection, and the request is on it: what it waited for ends here, the upstream's time begins."""
        self.reply = reply
        self.sent_s = self.now_s()

    def break_off(self, kind: BreakKind) -> None:
        """Ends it as `kind`, and its connection with it. What was not sent yet goes on: nothing has begun there."""
        if self.reply is not None and not self.reply.done():
            self.reply.set_exception(Broken(kind))
