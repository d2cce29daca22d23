"""Telling the log that an upstream fails, and that it is back: a line per change, not per request.

Looked at by the clock (`pool.probe`), so that nothing is added to a sample's way; what happened in between is a count.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from workers.upstream.upstream import Upstream

log = logging.getLogger(__name__)

# One upstream that comes and goes must not fill the log of every worker.
_SAY_EVERY_S: Final = 30.0


@dataclass(slots=True)
class _Told:
    """What the log knows of one upstream."""

    said_s: float = float("-inf")
    fails: bool = False
    failures: int = 0


class UpstreamNews:
    def __init__(self) -> None:
        self._told: dict[str, _Told] = {}

    def look(self, upstreams: Iterable[Upstream], now_s: float) -> None:
        """Log what has changed since the log was last told of it."""
        told_before, self._told = self._told, {}
        for upstream in upstreams:
            told = self._told[upstream.url] = told_before.get(upstream.url) or _Told()
            if now_s - told.said_s >= _SAY_EVERY_S and _is_news(upstream, told):
                _say(upstream, told, now_s)


def _is_news(upstream: Upstream, told: _Told) -> bool:
    fails = upstream.failures > 0
    return fails != told.fails or (not fails and upstream.failures_ever > told.failures)


def _say(upstream: Upstream, told: _Told, now_s: float) -> None:
    fails = upstream.failures > 0
    since_last = {"upstream": upstream.url, "failures": upstream.failures_ever - told.failures}
    if fails:
        log.warning("upstream fails, and rests between attempts", extra={**since_last, "error": upstream.last_failure})
    else:
        log.info("upstream completes samples again", extra={**since_last, "error": upstream.last_failure})
    told.said_s, told.fails, told.failures = now_s, fails, upstream.failures_ever
