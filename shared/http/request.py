"""What a handler is given: one request whose caller is known and whose body is whole or still to come."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.core.model import Value

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import Receive, Scope

    from shared.core.callers import Caller
    from shared.http.peer import Connection


class Request(Value, frozen=True):
    """`body` is whole and within its limit, or still to be had from `receive` where an endpoint leaves it there;
    `path` are the parameters of the route's path; `scope` tells the rest, as ASGI does, to who needs it.
    """

    caller: Caller
    body: bytes
    accept: bytes | None
    connection: Connection
    path: dict[str, str]
    scope: Callable[[], Scope]
    receive: Receive
    trace: str | None = None  # the caller's traceparent, if it is one
