"""Telling that an upstream's weights changed in the middle of a generation.

Its tokens and logprobs are then those of two policies, which a client that trains on them should know of; the SDK's
reply has no field for it. It is counted, and told to the log: at most a line per upstream in half a minute.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from shared.log import Throttle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shared.clock import Clock
    from shared.counters import Counters
    from workers.samples.live import LiveSample
    from workers.upstream.upstream import Upstream

log = logging.getLogger(__name__)

_SAY_EVERY_S: Final = 30.0


class WeightNews:
    def __init__(self, counters: Counters, clock: Clock) -> None:
        self._counters = counters
        self._clock = clock
        self._damping = Throttle(_SAY_EVERY_S)

    def changed(self, running: LiveSample, upstream: Upstream, mixed: Sequence[tuple[str, ...]]) -> None:
        """`mixed`: the versions of each sequence in whose middle the weights changed."""
        self._counters.mixed_weights += len(mixed)
        held_back = self._damping.allow(upstream.url, self._clock.monotonic_s())
        if held_back is None:
            return
        log.warning(
            "the weights changed in the middle of a generation",
            extra={
                "upstream": upstream.url,
                "request_id": running.request_id,
                "versions": list(mixed[0]),
                "sequences": len(mixed),
                "samples_not_told": held_back,
            },
        )
