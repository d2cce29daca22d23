"""Write the ending of a sample that the store does not take at once because it is away or full, or refuses.

While an ending waits, the client may still cancel the sample, or its session may end; then that is what is written. An
ending that the store can never take, or refuses again and again, is written as FAILED (`shared/core/retry.py`). If the
store refuses that as well, the sample is given up, and the reaper ends its record.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from shared.core.errors import StoreError, StoreFull, StoreRefused
from shared.core.retry import REFUSED_BY_STORE, Next, after_refusal, may_never_fit, never_fits
from shared.log import Throttle
from workers.samples.live import Ending, Phase

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from shared.clock import Clock
    from shared.core.model import Failure
    from shared.store.contract import Settled, Store
    from workers.samples.live import LiveSample, Pace
    from workers.samples.quota import Quota

    Write = Callable[[LiveSample, Ending], Awaitable[Settled]]

log = logging.getLogger(__name__)

# A store that refuses one ending refuses them all.
_LOG_EVERY_S: Final = 30.0


class Settler:
    """Keep writing endings until the store takes them. `write` is one attempt, and raises `StoreError`."""

    def __init__(self, write: Write, store: Store, quota: Quota, clock: Clock, pace: Pace) -> None:
        self._write = write
        self._store = store
        self._quota = quota
        self._clock = clock
        self._pace = pace
        self._throttle = Throttle(_LOG_EVERY_S)

    async def persist(self, sample: LiveSample, ending: Ending, error: StoreError) -> tuple[Ending, Settled | None]:
        """Write the ending of `sample`, which failed with `error`, and return what was written and with which outcome.

        The outcome is None if the store takes no ending of this sample.
        """
        sample.phase = Phase.WAITING
        pause_s, refusals = self._pace.store_retry_first_s, 0
        while True:
            refusals += isinstance(error, StoreRefused)
            step, failure = await self._judge(sample, ending, error, refusals)
            if step is Next.GIVE_UP:
                return ending, None
            replacement = Ending.failed(failure) if failure is not None else None
            if step is Next.AGAIN:
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, self._pace.store_retry_longest_s)
                replacement = sample.stop
            if replacement is not None and replacement is not ending:
                more_bytes = len(replacement.payload) - len(ending.payload)
                sample.held_bytes += more_bytes
                self._quota.grow(sample.holding, more_bytes)
                ending, refusals = replacement, 0
            try:
                return ending, await self._write(sample, ending)
            except StoreError as again:
                # Its traceback holds this frame: a cycle, with the payload in it.
                error = again.with_traceback(None)

    async def _judge(
        self, sample: LiveSample, ending: Ending, error: StoreError, refusals: int
    ) -> tuple[Next, Failure | None]:
        """Return what to do after `error`, and the failure to write instead if that is `Next.FAIL`."""
        if isinstance(error, StoreRefused):
            not_logged = self._throttle.allow("refused", self._clock.monotonic_s())
            if not_logged is not None:
                fields = {"request_id": sample.request_id, "error": str(error), "not_logged": not_logged}
                log.error("store refuses the ending of a sample", extra=fields)
            step = after_refusal(ending.state, refusals)
            return step, REFUSED_BY_STORE if step is Next.FAIL else None
        if isinstance(error, StoreFull):
            failure = await self._why_never(sample, ending)
            if failure is not None:
                return Next.FAIL, failure
            self._quota.note_store_full(self._clock.monotonic_s())
        return Next.AGAIN, None

    async def _why_never(self, sample: LiveSample, ending: Ending) -> Failure | None:
        """Explain why a store that says it is full will never take this ending; return None if it may."""
        if not may_never_fit(len(ending.payload)):
            return None
        try:
            limit_bytes = await self._store.limit_bytes(sample.key)
        except StoreError:
            return None
        return never_fits(len(ending.payload), limit_bytes)
