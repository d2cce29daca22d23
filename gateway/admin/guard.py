"""Who may use the admin address: not a web page that happens to be open in an operator's browser.

On loopback no key is needed, so another site could make an operator's browser send requests here: through a name whose
DNS entry points to 127.0.0.1 (rebinding), or through a form that it posts. Rebinding shows in `Host`, so that must be
an address or a loopback name, which need no DNS. A form shows in `Origin`. With an admin key `Host` needs no check: a
foreign page does not have the key.
"""

from __future__ import annotations

import hmac
from http import HTTPStatus
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final

from gateway.admin.page import PAGES, json_response

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Open without a key: an orchestrator's probes cannot send one and learn only "yes" or "no"; the page holds no data and
# asks its reader for the key.
_OPEN: Final = ("/livez", "/readyz", *PAGES)
_READING: Final = ("GET", "HEAD")
_HARDENING: Final = ((b"x-frame-options", b"DENY"), (b"x-content-type-options", b"nosniff"))


class Guard:
    """Pass allowed requests to `app`. With a `key`, they must carry it as `X-Admin-Key` or as a bearer token."""

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
            return HTTPStatus.MISDIRECTED_REQUEST, "use an IP address or localhost to reach this address"
        if scope["method"] not in _READING and is_foreign(headers.get(b"origin"), host):
            return HTTPStatus.FORBIDDEN, "a page of another site may not change anything here"
        if self._key is not None and scope["path"] not in _OPEN and not _carries(scope["headers"], self._key):
            return HTTPStatus.UNAUTHORIZED, "send the admin key as X-Admin-Key"
        return None


def _hardened(send: Send) -> Send:
    """Add headers so that no page can frame a reply and no browser guesses its type."""

    async def hardened(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *_HARDENING]
        await send(message)

    return hardened


def is_local_name(host: str) -> bool:
    """Return True if a `Host` header names an address or loopback, so that no DNS server decides where it leads."""
    name = host.rpartition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
    if name.lower() == "localhost" or name.lower().endswith(".localhost"):
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def is_foreign(origin: bytes | None, host: str) -> bool:
    """Return True if the request comes from a page of another origin. Programs other than browsers send no `Origin`."""
    return origin is not None and origin.decode("latin-1").partition("://")[2].lower() != host.lower()


def _carries(headers: list[tuple[bytes, bytes]], key: bytes) -> bool:
    """Return whether the key is there. Two headers that differ about it carry none."""
    for wanted, prefix in ((b"x-admin-key", b""), (b"authorization", b"Bearer ")):
        given = [value.removeprefix(prefix) for name, value in headers if name == wanted]
        if given:
            return len(given) == 1 and hmac.compare_digest(given[0], key)
    return False
