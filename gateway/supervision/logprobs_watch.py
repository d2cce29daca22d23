"""Check each upstream again and again: whether its sampled logprobs use the temperature, and which models it lists.

A vLLM may be restarted with other flags under the same URL. The watch notices an upstream that becomes wrong and one
that was fixed, without a restart of the gateway. It also logs a `--model` that no upstream lists.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gateway.admin.report import RAW_LOGPROBS

if TYPE_CHECKING:
    from collections.abc import Sequence

    import aiohttp

    from shared.channel import UpstreamStatus
    from shared.config import Settings

log = logging.getLogger("gateway.logprobs")


@dataclass(frozen=True, slots=True)
class ProbePace:
    """Set how often upstreams are probed, in seconds.

    `again_s`: while logprobs are raw or unknown. Loading a model takes minutes, and a probe is two tokens.
    `still_s`: while logprobs are right. Rarely, since a probe costs the upstream a prompt or two, but soon enough to
    stop a training run.
    `look_s`: how soon an upstream that is new on the list is probed.
    """

    again_s: float = 30.0
    still_s: float = 300.0
    look_s: float = 1.0


USUAL_PACE: Final = ProbePace()


async def watch_logprobs(settings: Settings, known: dict[str, bool | None], pace: ProbePace = USUAL_PACE) -> None:
    """Fill `known` until cancelled: upstream URL -> True, False, or None if unknown. Others may add and remove URLs."""
    await _Watch(settings, known, pace).run()


def follow_upstreams(known: dict[str, bool | None], statuses: Sequence[UpstreamStatus]) -> None:
    """Add the upstreams that a worker reports to `known`, and remove those that it no longer uses."""
    urls = [status.url for status in statuses if status.state != "leaving"]
    for url in set(known).difference(urls):
        del known[url]
    for url in urls:
        known.setdefault(url, None)


class _Watch:
    """The state of the watch, mostly to log each fact once.

    `_silent`: upstreams that were logged as not answering. `_listed`: models by upstream. `_missing`: models that were
    logged as missing.
    """

    def __init__(self, settings: Settings, known: dict[str, bool | None], pace: ProbePace) -> None:
        self._settings = settings
        self._known = known
        self._pace = pace
        self._silent: set[str] = set()
        self._listed: dict[str, set[str]] = {}
        self._missing: set[str] = set()

    async def run(self) -> None:
        due_s: dict[str, float] = {}
        loop = asyncio.get_running_loop()
        while True:
            due = [url for url in self._known if loop.time() >= due_s.get(url, 0.0)]
            if due:
                await self._probe_all(due)
                self._log_missing_models()
                due_s = {url: at_s for url, at_s in due_s.items() if url in self._known}
                sure = {url for url in due if self._known.get(url) and url not in self._silent}
                due_s |= {url: loop.time() + (self._pace.still_s if url in sure else self._pace.again_s) for url in due}
            await asyncio.sleep(self._pace.look_s)

    async def _probe_all(self, urls: list[str]) -> None:
        from gateway.supervision.upstream_probe import session  # late: the HTTP client costs a start 0.3 s of CPU

        async with session(self._settings.upstream_api_key) as http:
            for upstream in urls:
                scales = await self._probe(http, upstream)
                # An upstream that is busy or restarting keeps its last result until it answers.
                if upstream not in self._known or scales is None:
                    continue
                before, self._known[upstream] = self._known[upstream], scales
                if before is not False and not scales:
                    log.warning(RAW_LOGPROBS, extra={"upstream": upstream})
                elif before is False and scales:
                    log.info("sampled logprobs use the temperature now", extra={"upstream": upstream})

    async def _probe(self, http: aiohttp.ClientSession, upstream: str) -> bool | None:
        from gateway.supervision.upstream_probe import ProbeError, offered_models, probe_scaling, to_probe

        try:
            offered = await offered_models(http, upstream)
            self._listed[upstream] = {model.name for model in offered}
            names = to_probe(offered, self._settings.models)
            scales = await probe_scaling(http, upstream, names[0]) if names else None
        except ProbeError as error:
            # Visible once: without its upstream a start looks like any other, and samples just wait.
            level = logging.DEBUG if upstream in self._silent else logging.WARNING
            extra = {"upstream": upstream, "reason": str(error)}
            log.log(level, "an upstream does not work yet", extra=extra)
            self._silent.add(upstream)
            return None
        if upstream in self._silent:
            self._silent.remove(upstream)
            log.info("an upstream works now", extra={"upstream": upstream})
        return scales

    def _log_missing_models(self) -> None:
        """Log each `--model` that no upstream lists, once all have answered. Clients are offered it all the same."""
        if not self._known or not all(upstream in self._listed for upstream in self._known):
            return
        listed = set().union(*(self._listed[upstream] for upstream in self._known))
        for model in self._settings.models:
            if model.upstream_name not in listed and model.flag not in self._missing:
                self._missing.add(model.flag)
                log.warning("no upstream lists a model that --model offers", extra={"model": model.flag})
