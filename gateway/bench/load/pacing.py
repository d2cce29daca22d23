"""Limit how many submissions a process has open at once, as the SDK does.

`SubmitPolicy` decides, with the time as an argument; `SubmitGate` lets coroutines wait for its decision.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from shared.clock import Clock

# The SDK's own constants (versions 0.22 to 0.38).
MAX_SUBMITS: Final = 400
MAX_SUBMITS_THROTTLED: Final = 10
BACKPRESSURE_PAUSE_S: Final = 1.0
# After a 429 on a prompt above this size the pause is longer; the SDK estimates ten bytes per token.
LARGE_PROMPT_BYTES: Final = 128 * 1024
LARGE_PROMPT_PAUSE_S: Final = 5.0
THROTTLE_S: Final = 10.0


T = TypeVar("T")


def backpressure_pause_s(prompt_tokens: int) -> float:
    """Return how long the whole process pauses after a 429 on a prompt of this length."""
    return LARGE_PROMPT_PAUSE_S if prompt_tokens * 10 > LARGE_PROMPT_BYTES else BACKPRESSURE_PAUSE_S


class SubmitPolicy:
    """Count open submissions. One that starts while the process is throttled counts against a smaller limit."""

    def __init__(self) -> None:
        self.open = 0
        self.open_throttled = 0
        self.paused_until_s = float("-inf")
        self.throttled_until_s = float("-inf")

    def back_pressure(self, now_s: float, pause_s: float) -> None:
        self.paused_until_s = max(self.paused_until_s, now_s + pause_s)
        self.throttled_until_s = self.paused_until_s + THROTTLE_S

    def try_open(self, now_s: float) -> bool | None:
        """Open a submission and return whether it counts as throttled, or return None if none may start now."""
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
        """Return when more may start without a `close`, or None if only a `close` helps."""
        ahead = [at_s for at_s in (self.paused_until_s, self.throttled_until_s) if at_s > now_s]
        return min(ahead, default=None)


class SubmitGate:
    """Let submissions start in the order of arrival, within `SubmitPolicy`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._policy = SubmitPolicy()
        self._waiting: deque[asyncio.Future[bool]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    async def enter(self) -> bool:
        """Wait until a submission may start. Hand the returned value to `leave`."""
        if not self._waiting and (throttled := self._policy.try_open(self._clock.monotonic_s())) is not None:
            return throttled
        entered: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(entered)
        self.wake()
        try:
            return await entered
        except asyncio.CancelledError:
            if entered.done() and not entered.cancelled():
                self.leave(entered.result())
            raise

    def leave(self, throttled: bool) -> None:
        self._policy.close(throttled)
        self.wake()

    def back_pressure(self, pause_s: float) -> None:
        self._policy.back_pressure(self._clock.monotonic_s(), pause_s)

    def wake(self) -> None:
        """Let in everyone who may start now, and set a timer for the next time at which more may."""
        now_s = self._clock.monotonic_s()
        while self._waiting:
            if self._waiting[0].done():
                self._waiting.popleft()
                continue
            throttled = self._policy.try_open(now_s)
            if throttled is None:
                break
            self._waiting.popleft().set_result(throttled)
        self.close()
        change_s = self._policy.next_change_s(now_s) if self._waiting else None
        if change_s is not None:
            self._timer = asyncio.get_running_loop().call_later(change_s - now_s + 0.001, self.wake)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


async def at_most(concurrency: int, items: Iterator[T], run: Callable[[T], Awaitable[None]]) -> None:
    """Run each of `items` in order, at most `concurrency` at a time."""

    async def in_turn() -> None:
        for item in items:
            await run(item)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(in_turn())
