"""The supervisor's question to each upstream, until it is answered: do its sampled logprobs heed the temperature?"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from gateway.admin.report import RAW_LOGPROBS

if TYPE_CHECKING:
    import aiohttp

    from shared.config import Settings

log = logging.getLogger("gateway.logprobs")

# An upstream that is loading a model takes minutes; a probe is two tokens.
_AGAIN_S: Final = 30.0


async def watch_logprobs(settings: Settings, known: dict[str, bool | None]) -> None:
    """Fill `known` (upstream URL -> True, False, or None while unknown); returns when nothing is left to ask."""
    from gateway.upstream_probe import session  # late: the HTTP client costs a start 0.3 s of CPU

    silent: set[str] = set()
    async with session(settings.upstream_api_key) as http:
        while True:
            for upstream in [url for url, scales in known.items() if scales is None]:
                known[upstream] = await _ask(http, settings, upstream, silent)
            if None not in known.values():
                return
            await asyncio.sleep(_AGAIN_S)


async def _ask(http: aiohttp.ClientSession, settings: Settings, upstream: str, silent: set[str]) -> bool | None:
    from gateway.upstream_probe import ProbeError, offered_models, probe_scaling

    try:
        bases = [model.name for model in await offered_models(http, upstream) if model.parent is None]
        names = [model.upstream_name for model in settings.models] or bases
        scales = await probe_scaling(http, upstream, names[0]) if names else None
    except ProbeError as error:
        # Once at a level that is seen: a start without its upstream looks like any other, and samples just wait.
        level = logging.DEBUG if upstream in silent else logging.WARNING
        log.log(level, "an upstream does not answer as vLLM does", extra={"upstream": upstream, "reason": str(error)})
        silent.add(upstream)
        return None
    if upstream in silent:
        silent.remove(upstream)
        log.info("an upstream answers now", extra={"upstream": upstream})
    if scales is False:
        log.warning(RAW_LOGPROBS, extra={"upstream": upstream})
    return scales
