"""The request as a handler gets it: its caller is known, its body is whole or still to come."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.core.model import Value

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from starlette.types import Receive, Scope

    from shared.core.callers import Caller
    from shared.http.peer import Connection


class Request(Value, frozen=True):
    """One request.

    `body` is whole and within its limit; where an endpoint leaves the body to the handler it comes from `receive`.
    `path` are the parameters of the route's path. `scope` returns the rest, as ASGI describes it.
    """

    caller: Caller
    body: bytes
    accept: bytes | None
    connection: Connection
    path: Mapping[str, str]
    scope: Callable[[], Scope]
    receive: Receive
    trace: str | None = None  # the caller's traceparent, if it is one
