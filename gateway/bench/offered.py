"""Which model a gateway offers, when nobody named one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import aiohttp

from shared.core.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Mapping


async def offered_model(url: str, api_key: str) -> str:
    """The first base model in the gateway's capabilities. Raises `StartError`."""
    try:
        async with (
            aiohttp.ClientSession(headers={"X-API-Key": api_key}) as session,
            session.get(f"{url}/api/v1/get_server_capabilities", timeout=aiohttp.ClientTimeout(total=30.0)) as response,
        ):
            body = await response.json(content_type=None)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise StartError(f"no gateway answers at {url}: {_reason(error)}") from error
    if response.status != 200:
        raise StartError(f"the gateway at {url} answered {response.status} when asked for its models: {body}")
    return first_model(body, url)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno).lower()
    return str(error) or "no reply in time"


def first_model(capabilities: Mapping[str, Any], url: str) -> str:
    for model in capabilities.get("supported_models") or ():
        if name := model.get("model_name"):
            return str(name)
    raise StartError(f"the gateway at {url} offers no model; name one with --model")
