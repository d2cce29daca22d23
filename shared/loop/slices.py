"""Do something to everything in flight without holding up the event loop: a slice in each of its turns.

What a slice wakes or cancels runs before the next one, so that a turn costs what one slice costs, and heartbeats, new
samples and the lease come in between.
"""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator

T = TypeVar("T")

# A poll that looks again, or a sample that is interrupted, costs 0.1 to 0.2 ms: some 15 ms a turn.
SLICE: Final = 100


def in_slices(act: Callable[[T], object], items: Iterable[T]) -> None:
    """Call `act` with the first `SLICE` items now, and with the others in the next turns. It must not raise."""
    _next_slice(act, iter(items), asyncio.get_running_loop())


def _next_slice(act: Callable[[T], object], rest: Iterator[T], loop: asyncio.AbstractEventLoop) -> None:
    batch = list(islice(rest, SLICE))
    for item in batch:
        act(item)
    if len(batch) == SLICE:
        loop.call_soon(_next_slice, act, rest, loop)


def batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield batches, for code that awaits an answer after each."""
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch


async def in_turns(items: Iterable[T], size: int) -> AsyncIterator[list[T]]:
    """Yield batches with a turn of the loop after each, for code that awaits nothing."""
    for batch in batches(items, size):
        yield batch
        await asyncio.sleep(0)


async def run_in_batches(calls: Iterable[Coroutine[None, None, object]], at_once: int, batches_ahead: int) -> None:
    """Run all these calls, `at_once` more in each turn of the loop, with at most `batches_ahead` batches under way.

    When one has failed, no further batch is begun; the first error is raised when all that were begun have ended.
    """
    ahead: deque[asyncio.Task[BaseException | None]] = deque()
    error: BaseException | None = None
    try:
        for batch in batches(calls, at_once):
            ahead.append(asyncio.create_task(_first_error(batch)))
            await asyncio.sleep(0)
            if len(ahead) >= batches_ahead and (error := await ahead.popleft()):
                break
        while ahead:
            later = await ahead.popleft()
            error = error or later
    finally:
        for task in ahead:
            task.cancel()
        await asyncio.gather(*ahead, return_exceptions=True)
    if error is not None:
        raise error


async def _first_error(calls: list[Coroutine[None, None, object]]) -> BaseException | None:
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    return next((outcome for outcome in outcomes if isinstance(outcome, BaseException)), None)
