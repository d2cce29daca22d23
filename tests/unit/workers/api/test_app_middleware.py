"""No layer between the edge and the handlers hides that a client has gone."""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING, Any

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.routing import Mount, Route

from shared.counters import Counters
from workers.api import app as public_app

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.types import ASGIApp, Receive, Scope, Send


def layers(app: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """`app` and everything that it wraps, mounts or routes to, once each."""
    seen = set() if seen is None else seen
    if app is None or id(app) in seen:
        return
    seen.add(id(app))
    yield app
    if isinstance(app, Starlette) and app.middleware_stack is None:
        # Starlette builds its stack with the first request, and keeps it.
        app.middleware_stack = app.build_middleware_stack()
    for name in ("app", "middleware_stack"):
        wrapped = getattr(app, name, None)
        # A router's `app` is its innermost method, not something that it wraps.
        yield from layers(None if isinstance(wrapped, MethodType) else wrapped, seen)
    for route in getattr(app, "routes", ()):
        yield from layers(route, seen)


def hiding_layers(app: Any) -> list[str]:
    """Names of the layers of `app` that are BaseHTTPMiddleware."""
    return [type(layer).__name__ for layer in layers(app) if isinstance(layer, BaseHTTPMiddleware)]


class Hiding(BaseHTTPMiddleware):
    pass


async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError("only looked at")


class Plain:
    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


@pytest.mark.parametrize(
    "app",
    [
        Starlette(middleware=[Middleware(Hiding)]),
        Plain(Starlette(middleware=[Middleware(Plain), Middleware(Hiding)])),
        Starlette(routes=[Mount("/a", app=Starlette(middleware=[Middleware(Hiding)]))]),
        Starlette(routes=[Mount("/a", routes=[Route("/b", endpoint, middleware=[Middleware(Hiding)])])]),
    ],
    ids=["outermost", "behind another", "mounted", "of a route"],
)
def test_found_wherever_it_is(app: Any) -> None:
    assert hiding_layers(app) == ["Hiding"]


def test_none_in_ours() -> None:
    """B17"""

    def make(path: str, handler: object, **kinds: object) -> Any:
        return Plain(endpoint)

    starlette = public_app._starlette(make, Counters(), public_app.ROUTED)
    assert len(list(layers(starlette))) > len(public_app.ROUTED)
    assert hiding_layers(starlette) == []
