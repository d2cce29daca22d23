"""`/upstreams` on the admin address: the published list of upstreams, which all workers of all hosts use."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

import msgspec

from gateway.admin.page import json_response
from gateway.admin.report import upstreams
from gateway.settings import urls
from shared.core.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request
    from starlette.responses import Response

    from gateway.admin.view import Controls

# Enough for a few hundred URLs; every worker keeps them all.
_LARGEST_BODY_BYTES: Final = 64 * 1024
_decoder: Final = msgspec.json.Decoder(list[str])


class UpstreamsEndpoint:
    def __init__(self, controls: Controls) -> None:
        self._controls = controls

    async def show(self, request: Request) -> Response:
        return await self._reply(None)

    async def publish(self, request: Request) -> Response:
        """Publish the JSON list of base URLs in the body."""
        try:
            wanted = read_list(await _body(request))
        except ValueError as error:
            return json_response({"detail": str(error)}, HTTPStatus.BAD_REQUEST)
        return await self._reply(wanted)

    async def reset(self, request: Request) -> Response:
        """Go back to the upstreams of the flags."""
        return await self._reply(())

    async def _reply(self, wanted: Sequence[str] | None) -> Response:
        try:
            published = await self._controls.upstream_list(wanted)
        except StoreError as error:
            return json_response({"detail": f"Redis: {error}"}, HTTPStatus.SERVICE_UNAVAILABLE)
        view = self._controls.view()
        body: dict[str, Any] = {
            "source": "published" if published else "flags",
            "urls": list(published or view.flag_upstreams),
            "upstreams": upstreams(view),
        }
        return json_response(body)


def read_list(body: bytes) -> tuple[str, ...]:
    """Parse a JSON list of base URLs and drop duplicates. Raises `ValueError` with a sentence for the operator."""
    try:
        given = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise ValueError('give a JSON list of base URLs, such as ["http://10.0.0.5:8000"]') from None
    if not given:
        raise ValueError("an empty list would serve nobody; DELETE /upstreams goes back to the flags")
    return tuple(dict.fromkeys(_checked(url) for url in given))


def _checked(url: str) -> str:
    try:
        return urls.upstream_url(url)
    except ValueError as error:
        shown = "a URL with credentials" if "@" in url else repr(url)
        raise ValueError(f"{shown} is not allowed; {error}") from None


async def _body(request: Request) -> bytes:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _LARGEST_BODY_BYTES:
            raise ValueError(f"the list is longer than {_LARGEST_BODY_BYTES} bytes")
    return body
