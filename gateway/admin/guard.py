"""Who may talk to the operators' address: not a web page that an operator's browser has open.

On loopback no key is needed, so the browser of whoever is logged in could be made to ask for another site: by a name of
that site which its DNS points to 127.0.0.1 (rebinding), or by a form that it posts here. The first shows in `Host`,
which must then be an address or a loopback name: no DNS is asked for those. The second shows in `Origin`. With an admin
key the first needs no check: a foreign page has no key.
"""

from __future__ import annotations

import hmac
from http import HTTPStatus
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final

from gateway.admin.page import PAGES, json_response

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

# The probes of an orchestrator cannot carry a key and learn nothing but "yes" or "no"; the page holds no data, and asks
# its reader for the key.
_OPEN: Final = ("/livez", "/readyz", *PAGES)
_READING: Final = ("GET", "HEAD")
_HARDENING: Final = ((b"x-frame-options", b"DENY"), (b"x-content-type-options", b"nosniff"))


class Guard:
    """Lets requests through to `app`; with a `key`, those that carry it as `X-Admin-Key` or as a bearer token."""

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self.app = app
        self._key = key.encode() if key is not None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is not None:
            code, detail = refusal
            await json_response({"detail": detail}, code)(scope, receive, send)
            return
        await self.app(scope, receive, _hardened(send))

    def _refusal(self, scope: Scope) -> tuple[HTTPStatus, str] | None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1")
        if self._key is None and not is_local_name(host):
            return HTTPStatus.MISDIRECTED_REQUEST, "ask for this address by an IP address or as localhost"
        if scope["method"] not in _READING and is_foreign(headers.get(b"origin"), host):
            return HTTPStatus.FORBIDDEN, "a page of another site may not change anything here"
        if self._key is not None and scope["path"] not in _OPEN and not _carries(headers, self._key):
            return HTTPStatus.UNAUTHORIZED, "the admin key is needed, as X-Admin-Key"
        return None


def _hardened(send: Send) -> Send:
    """Replies that no page can frame, and no browser takes for something else than they say."""

    async def hardened(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *_HARDENING]
        await send(message)

    return hardened


def is_local_name(host: str) -> bool:
    """Whether a `Host` header is one that no DNS server has a say in."""
    name = host.rpartition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
    if name.lower() == "localhost" or name.lower().endswith(".localhost"):
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def is_foreign(origin: bytes | None, host: str) -> bool:
    """Whether a browser says that a page of another origin asks; what is no browser sends no `Origin`."""
    return origin is not None and origin.decode("latin-1").partition("://")[2].lower() != host.lower()


def _carries(headers: dict[bytes, bytes], key: bytes) -> bool:
    given = headers.get(b"x-admin-key") or headers.get(b"authorization", b"").removeprefix(b"Bearer ")
    return hmac.compare_digest(given, key)
