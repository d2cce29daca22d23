"""Writing the one ending of a sample: at once as a rule, else for as long as the store is away or full.

While an ending waits, the client may still cancel it, or its session end: what is written then is that. What the store
can never take, or refuses again and again, is written as FAILED (`shared/core/retry.py`); when it refuses that as
well, the sample is let go, and its record is left to the reaper.
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
    from workers.samples.live import LiveSample

log = logging.getLogger(__name__)

# Pauses between attempts to reach a store that is away; the client has long been told "try again".
STORE_RETRY_FIRST_S: Final = 0.1
STORE_RETRY_LONGEST_S: Final = 2.0
# What the store refuses, it refuses of every sample.
_LOG_EVERY_S: Final = 30.0


class Settler:
    """`hold(running, more_bytes)` accounts for what waits here; `note_full` hears that the store has no room."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        ttl_s: float,
        hold: Callable[[LiveSample, int], None],
        note_full: Callable[[], None],
    ) -> None:
        self._store = store
        self._clock = clock
        self._ttl_s = ttl_s
        self.hold = hold
        self.note_full = note_full
        self._damping = Throttle(_LOG_EVERY_S)

    async def settle(self, running: LiveSample, ending: Ending) -> tuple[Ending, Settled | None]:
        """What was written, and what became of that; None when the store takes no ending of this sample."""
        self.hold(running, len(ending.payload))
        try:
            return ending, await self.write(running, ending)
        except StoreError as error:
            return await _Kept(self, running, ending).persist(error)

    def write(self, running: LiveSample, ending: Ending) -> Awaitable[Settled]:
        """Raises `StoreError` when awaited."""
        return self._store.settle(
            running.key,
            running.claim,
            ending.state,
            ending.payload,
            ttl_s=self._ttl_s,
            now_ms=self._clock.wall_ms(),
        )

    async def why_never(self, running: LiveSample, ending: Ending) -> Failure | None:
        """Why a store that says it is full will not take this ending later either."""
        if not may_never_fit(len(ending.payload)):
            return None
        try:
            limit_bytes = await self._store.limit_bytes(running.key)
        except StoreError:
            return None
        return never_fits(len(ending.payload), limit_bytes)

    def log_refusal(self, error: StoreRefused, running: LiveSample) -> None:
        held_back = self._damping.allow("refused", self._clock.monotonic_s())
        if held_back is not None:
            log.error(
                "store refuses the ending of a sample",
                extra={"request_id": running.request_id, "error": str(error), "not_logged": held_back},
            )


class _Kept:
    """One ending that waits for the store."""

    def __init__(self, settler: Settler, running: LiveSample, ending: Ending) -> None:
        self._settler = settler
        self._running = running
        self._ending = ending
        self._refusals = 0
        self._pause_s = STORE_RETRY_FIRST_S

    async def persist(self, error: StoreError) -> tuple[Ending, Settled | None]:
        self._running.phase = Phase.WAITING
        while True:
            if await self._take_in(error) is Next.GIVE_UP:
                return self._ending, None
            try:
                return self._ending, await self._settler.write(self._running, self._ending)
            except StoreError as again:
                # Its traceback holds this frame: a circle, with the payload in it.
                error = again.with_traceback(None)

    async def _take_in(self, error: StoreError) -> Next:
        """Draw the consequences of `error`, and wait."""
        match error:
            case StoreRefused():
                step = self._refused(error)
            case StoreFull():
                step = await self._full()
            case _:
                step = Next.AGAIN
        if step is Next.AGAIN:
            await asyncio.sleep(self._pause_s)
            self._pause_s = min(self._pause_s * 2, STORE_RETRY_LONGEST_S)
            if self._running.stop is not None:
                self._replace(self._running.stop)
        return step

    def _refused(self, error: StoreRefused) -> Next:
        self._refusals += 1
        self._settler.log_refusal(error, self._running)
        step = after_refusal(self._ending.state, self._refusals)
        if step is Next.FAIL:
            self._replace(Ending.failed(REFUSED_BY_STORE))
        return step

    async def _full(self) -> Next:
        failure = await self._settler.why_never(self._running, self._ending)
        if failure is None:
            self._settler.note_full()
            return Next.AGAIN
        self._replace(Ending.failed(failure))
        return Next.FAIL

    def _replace(self, ending: Ending) -> None:
        if ending is self._ending:
            return
        self._settler.hold(self._running, len(ending.payload) - len(self._ending.payload))
        self._ending, self._refusals = ending, 0
