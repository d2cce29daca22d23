"""A request's target as ASGI tells it: path, raw path and query string."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

import httptools

if TYPE_CHECKING:
    from uvicorn._types import HTTPScope

# What needs no taking apart: nearly every request's. A second slash at the start would be read as a host.
_PLAIN: Final = re.compile(rb"/[A-Za-z0-9_.~-][A-Za-z0-9_.~/-]*")


def place(scope: HTTPScope, url: bytes) -> None:
    """Writes what `url` says into `scope`. Raises httptools' error when it is no URL."""
    if _PLAIN.fullmatch(url):
        scope["path"], scope["raw_path"], scope["query_string"] = url.decode("ascii"), url, b""
        return
    parsed = httptools.parse_url(url)
    path = parsed.path.decode("ascii")
    scope["path"] = unquote(path) if "%" in path else path
    scope["raw_path"] = parsed.path
    scope["query_string"] = parsed.query or b""
