"""Replies of the admin address: JSON, and the operators' page.

The page is three static files that read `/status`. They hold no data, so they need no admin key.
"""

from __future__ import annotations

from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import orjson
from starlette.responses import Response
from starlette.routing import Route

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request


def json_response(body: dict[str, Any], code: HTTPStatus = HTTPStatus.OK) -> Response:
    return Response(orjson.dumps(body), code, media_type="application/json")


_DIRECTORY: Final = Path(__file__).parent / "dashboard"
# path -> (file, content type)
PAGES: Final = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/dashboard.css": ("dashboard.css", "text/css; charset=utf-8"),
    "/dashboard.js": ("dashboard.js", "text/javascript; charset=utf-8"),
}
_HEADERS: Final = {
    # Nothing from other sites, nothing inline, no frames: a name chosen by an upstream can do no harm.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_routes() -> list[Route]:
    return [Route(path, _serving((_DIRECTORY / name).read_bytes(), kind)) for path, (name, kind) in PAGES.items()]


def _serving(body: bytes, kind: str) -> Callable[[Request], Awaitable[Response]]:
    async def serve(request: Request) -> Response:
        return Response(body, headers={**_HEADERS, "Content-Type": kind})

    return serve
