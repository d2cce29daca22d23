"""How many submissions a process may have open at once, and when: the SDK's dispatch limits.

`SubmitPolicy` decides with the time handed in; `SubmitGate` lets coroutines wait for its word.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from shared.clock import Clock

# The SDK's own figures (0.22 to 0.38).
MAX_SUBMITS: Final = 400
MAX_SUBMITS_THROTTLED: Final = 10
BACKPRESSURE_PAUSE_S: Final = 1.0
# Prompts above this estimate pause longer; the SDK reckons ten bytes a token.
LARGE_PROMPT_BYTES: Final = 128 * 1024
LARGE_PROMPT_PAUSE_S: Final = 5.0
THROTTLE_S: Final = 10.0


T = TypeVar("T")


def backpressure_pause_s(prompt_tokens: int) -> float:
    """How long the whole process rests after a 429 on a prompt of this length."""
    return LARGE_PROMPT_PAUSE_S if prompt_tokens * 10 > LARGE_PROMPT_BYTES else BACKPRESSURE_PAUSE_S


class SubmitPolicy:
    """Counts of open submissions; a submission that starts in a throttled time counts against the small limit."""

    def __init__(self) -> None:
        self.open = 0
        self.open_throttled = 0
        self.paused_until_s = float("-inf")
        self.throttled_until_s = float("-inf")

    def back_pressure(self, now_s: float, pause_s: float) -> None:
        self.paused_until_s = max(self.paused_until_s, now_s + pause_s)
        self.throttled_until_s = self.paused_until_s + THROTTLE_S

    def try_open(self, now_s: float) -> bool | None:
        """Opens a submission if one may start; then tells whether it counts as throttled. None: not now."""
        if now_s < self.paused_until_s or self.open >= MAX_SUBMITS:
            return None
        throttled = now_s < self.throttled_until_s
        if throttled and self.open_throttled >= MAX_SUBMITS_THROTTLED:
            return None
        self.open += 1
        self.open_throttled += throttled
        return throttled

    def close(self, throttled: bool) -> None:
        self.open -= 1
        self.open_throttled -= throttled

    def next_change_s(self, now_s: float) -> float | None:
        """When time alone lets more start; None when only a `close` does."""
        ahead = [at_s for at_s in (self.paused_until_s, self.throttled_until_s) if at_s > now_s]
        return min(ahead, default=None)


class SubmitGate:
    """First come, first served, within `SubmitPolicy`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._policy = SubmitPolicy()
        self._waiting: deque[asyncio.Future[bool]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    async def enter(self) -> bool:
        """Waits for a place; the value goes back to `leave`."""
        if not self._waiting and (throttled := self._policy.try_open(self._clock.monotonic_s())) is not None:
            return throttled
        place: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        self.wake()
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.leave(place.result())
            raise

    def leave(self, throttled: bool) -> None:
        self._policy.close(throttled)
        self.wake()

    def back_pressure(self, pause_s: float) -> None:
        self._policy.back_pressure(self._clock.monotonic_s(), pause_s)

    def wake(self) -> None:
        """Lets in whoever may start now, and sets a timer for when time alone will let in more."""
        now_s = self._clock.monotonic_s()
        while self._waiting:
            if self._waiting[0].done():
                self._waiting.popleft()
                continue
            throttled = self._policy.try_open(now_s)
            if throttled is None:
                break
            self._waiting.popleft().set_result(throttled)
        self._set_timer(now_s)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self, now_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        change_s = self._policy.next_change_s(now_s) if self._waiting else None
        if change_s is not None:
            self._timer = asyncio.get_running_loop().call_later(change_s - now_s + 0.001, self.wake)


async def at_most(concurrency: int, items: Iterator[T], run: Callable[[T], Awaitable[None]]) -> None:
    """`run` each of `items`, in their order, and so many of them at a time."""

    async def in_turn() -> None:
        for item in items:
            await run(item)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(in_turn())
