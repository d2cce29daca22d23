"""Forward with httpx, without a limit on connections, as a small server in front of vLLM would."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx

if TYPE_CHECKING:
    from collections.abc import Mapping

ATTEMPTS = 5


class HttpxForwarder:
    def __init__(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=4.0)
        self._client = httpx.AsyncClient(limits=limits, timeout=None, trust_env=False)

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        """Return the body of a 200. Raises `httpx.HTTPError`."""
        headers = {**headers, "Content-Type": "application/json"}
        for _ in range(ATTEMPTS - 1):
            try:
                return (await self._client.post(url, content=body, headers=headers)).raise_for_status().content
            except httpx.TransportError:
                # httpx leaves a kept connection that was closed meanwhile to the caller.
                continue
        return (await self._client.post(url, content=body, headers=headers)).raise_for_status().content

    async def close(self) -> None:
        await self._client.aclose()
