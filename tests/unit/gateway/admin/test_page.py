"""The operators' page does no harm with what it shows."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from starlette.applications import Starlette

from gateway.admin.page import PAGES, page_routes

if TYPE_CHECKING:
    from starlette.types import Message

APP = Starlette(routes=page_routes())


async def fetched(path: str) -> tuple[dict[str, str], str]:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    await APP({"type": "http", "method": "GET", "path": path, "headers": [], "query_string": b""}, receive, send)
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return headers, b"".join(message.get("body", b"") for message in sent).decode()


@pytest.mark.parametrize("path", PAGES)
async def test_nothing_from_elsewhere_and_nothing_inline(path: str) -> None:
    headers, body = await fetched(path)
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["connect-src"] == "'self'"
    assert "unsafe" not in headers["content-security-policy"]
    assert not re.search(r"(src|href)=\"(https?:)?//", body)


async def test_what_it_shows_is_never_markup() -> None:
    """Upstreams and models choose their names."""
    _, script = await fetched("/dashboard.js")
    assert "textContent" in script
    for way_in in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
        assert way_in not in script
