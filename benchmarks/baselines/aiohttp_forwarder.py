"""Forward with an aiohttp session, without a limit on connections."""

from __future__ import annotations

from typing import TYPE_CHECKING

import aiohttp

if TYPE_CHECKING:
    from collections.abc import Mapping


class AiohttpForwarder:
    def __init__(self) -> None:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        """Return the body of a 200. Raises `aiohttp.ClientError`."""
        headers = {**headers, "Content-Type": "application/json"}
        async with self._session.post(url, data=body, headers=headers) as response:
            response.raise_for_status()
            return await response.read()

    async def close(self) -> None:
        await self._session.close()
