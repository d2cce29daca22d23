"""The supervisor's question to each upstream, again and again: do its sampled logprobs heed the temperature?

A vLLM may be started anew with other flags under the same URL: one that is mended is told of as mended, and one that is
not right any more is found, without a restart of the gateway. What it lists is looked at by the way: a `--model` that
none has is logged.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from gateway.admin.report import RAW_LOGPROBS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import aiohttp

    from shared.channel import UpstreamStatus
    from shared.config import Settings

log = logging.getLogger("gateway.logprobs")

# An upstream that is loading a model takes minutes; a probe is two tokens.
_AGAIN_S: Final = 30.0
# While the answer is yes: rarely, since it costs the upstream a prompt or two, and soon enough to stop a training run.
_STILL_S: Final = 300.0
# How soon an upstream that is new on the list is asked.
_LOOK_S: Final = 1.0


@dataclass(slots=True)
class _Told:
    """`silent`: upstreams that were logged as such. `listed`: by upstream, its models. `missing`: models, as logged."""

    silent: set[str] = field(default_factory=set)
    listed: dict[str, set[str]] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)


async def watch_logprobs(settings: Settings, known: dict[str, bool | None]) -> None:
    """Fill `known` (upstream URL -> True, False, or None while unknown), also with what others add to it; endless."""
    told = _Told()
    due_s: dict[str, float] = {}
    loop = asyncio.get_running_loop()
    while True:
        due = [url for url in known if loop.time() >= due_s.get(url, 0.0)]
        if due:
            await _ask_all(settings, due, known, told)
            _log_missing_models(settings, known, told)
            due_s = {url: at_s for url, at_s in due_s.items() if url in known}
            sure = {url for url in due if known.get(url) and url not in told.silent}
            due_s |= {url: loop.time() + (_STILL_S if url in sure else _AGAIN_S) for url in due}
        await asyncio.sleep(_LOOK_S)


def follow_upstreams(known: dict[str, bool | None], told: Sequence[UpstreamStatus]) -> None:
    """Ask about those that a worker tells of; forget those that it asks no more."""
    urls = [upstream.url for upstream in told if upstream.state != "leaving"]
    for url in set(known).difference(urls):
        del known[url]
    for url in urls:
        known.setdefault(url, None)


async def _ask_all(settings: Settings, urls: list[str], known: dict[str, bool | None], told: _Told) -> None:
    from gateway.supervision.upstream_probe import session  # late: the HTTP client costs a start 0.3 s of CPU

    async with session(settings.upstream_api_key) as http:
        for upstream in urls:
            scales = await _ask(http, settings, upstream, told)
            # One that is busy, or restarts, is as it was until it has answered.
            if upstream in known and scales is not None:
                _log_change(upstream, known[upstream], scales)
                known[upstream] = scales


async def _ask(http: aiohttp.ClientSession, settings: Settings, upstream: str, told: _Told) -> bool | None:
    from gateway.supervision.upstream_probe import ProbeError, offered_models, probe_scaling, to_probe

    try:
        offered = await offered_models(http, upstream)
        told.listed[upstream] = {model.name for model in offered}
        names = to_probe(offered, settings.models)
        scales = await probe_scaling(http, upstream, names[0]) if names else None
    except ProbeError as error:
        # Once at a level that is seen: a start without its upstream looks like any other, and samples just wait.
        level = logging.DEBUG if upstream in told.silent else logging.WARNING
        log.log(level, "an upstream does not answer as vLLM does", extra={"upstream": upstream, "reason": str(error)})
        told.silent.add(upstream)
        return None
    if upstream in told.silent:
        told.silent.remove(upstream)
        log.info("an upstream answers now", extra={"upstream": upstream})
    return scales


def _log_change(upstream: str, before: bool | None, scales: bool) -> None:
    if before is not False and not scales:
        log.warning(RAW_LOGPROBS, extra={"upstream": upstream})
    elif before is False and scales:
        log.info("sampled logprobs heed the temperature now", extra={"upstream": upstream})


def _log_missing_models(settings: Settings, known: Mapping[str, bool | None], told: _Told) -> None:
    """Once for each `--model` that no upstream lists, when all have answered; clients are offered it all the same."""
    if not known or not all(upstream in told.listed for upstream in known):
        return
    listed = set().union(*(told.listed[upstream] for upstream in known))
    for model in settings.models:
        if model.upstream_name not in listed and model.flag not in told.missing:
            told.missing.add(model.flag)
            log.warning("no upstream lists a model that --model offers", extra={"model": model.flag})
