"""Who may talk to the operators' address."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from starlette.responses import PlainTextResponse

from gateway.admin.guard import Guard, is_foreign, is_local_name

if TYPE_CHECKING:
    from starlette.types import Message


async def ask(guard: Guard, method: str = "GET", path: str = "/status", **headers: str) -> tuple[int, dict[str, str]]:
    named = {"host": "127.0.0.1:8001", **{name.replace("_", "-"): value for name, value in headers.items()}}
    sent: list[Message] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    # Two values of one header are divided by a bar.
    encoded = [(name.encode(), one.encode("latin-1")) for name, value in named.items() for one in value.split("|")]
    await guard({"type": "http", "method": method, "path": path, "headers": encoded}, receive, send)
    return sent[0]["status"], {name.decode(): value.decode() for name, value in sent[0]["headers"]}


OPEN = Guard(PlainTextResponse("ok"), None)
KEYED = Guard(PlainTextResponse("ok"), "op-key")


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("localhost", True),
        ("LOCALHOST:8001", True),
        ("a.localhost:1", True),
        ("127.0.0.1:8001", True),
        ("10.1.2.3", True),
        ("[::1]:8001", True),
        ("[::1]", True),
        ("", False),
        ("evil.example:8001", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil.example", False),
        ("[evil.example]", False),
        ("0x7f.1", False),
        ("\xff", False),
    ],
)
async def test_a_name_that_dns_answers_for_is_not_ours(host: str, local: bool) -> None:
    assert is_local_name(host) is local
    assert (await ask(OPEN, host=host))[0] == (200 if local else 421)
    assert (await ask(KEYED, host=host, x_admin_key="op-key"))[0] == 200, "a foreign page has no key"


@pytest.mark.parametrize(
    ("origin", "foreign"),
    [
        (None, False),
        (b"http://127.0.0.1:8001", False),
        (b"https://evil.example", True),
        (b"http://127.0.0.1:9999", True),
        (b"null", True),
        (b"", True),
    ],
)
async def test_another_sites_page_changes_nothing(origin: bytes | None, foreign: bool) -> None:
    assert is_foreign(origin, "127.0.0.1:8001") is foreign
    headers = {"origin": origin.decode()} if origin is not None else {}
    for method in ("POST", "PUT", "DELETE"):
        assert (await ask(OPEN, method, "/reload", **headers))[0] == (403 if foreign else 200)
        assert (await ask(KEYED, method, "/reload", x_admin_key="op-key", **headers))[0] == (403 if foreign else 200)
    assert (await ask(OPEN, "GET", **headers))[0] == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"x_admin_key": "other"}, 401),
        ({"x_admin_key": "\xff"}, 401),
        ({"authorization": "op-key-"}, 401),
        ({"x_admin_key": "op-key"}, 200),
        ({"authorization": "Bearer op-key"}, 200),
        ({"x_admin_key": "op-key|op-key"}, 401),
        ({"x_admin_key": "other|op-key"}, 401),
        ({"authorization": "Bearer other|Bearer op-key"}, 401),
    ],
)
async def test_the_key(headers: dict[str, str], status: int) -> None:
    assert (await ask(KEYED, **headers))[0] == status
    assert (await ask(KEYED, path="/livez", **headers))[0] == 200


async def test_no_page_frames_it() -> None:
    _, headers = await ask(OPEN)
    assert (headers["x-frame-options"], headers["x-content-type-options"]) == ("DENY", "nosniff")
