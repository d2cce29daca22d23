"""Measure the longest turn of a worker's event loop while something happens to all its samples, in CPU time.

    python -m benchmarks.longest_turn [--in-flight N]

One worker runs N samples and another holds N polls for them, both in this process on the in-memory store. The figures
are a lower bound, since with Redis each sample costs one command more.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import inspect
import sys
import time
from functools import partial
from typing import TYPE_CHECKING

import uvloop

from tests.app_bench import AppBench, request_id
from tests.worker_bench import SESSION_ID

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.app_bench import Answered

OTHER = "fedcba9876543210"
# More turns than any of these steps takes.
_SETTLE_TURNS = 1000


async def longest_turn_s(begin: Callable[[], object], is_over: Callable[[], bool]) -> float:
    """Return the longest turn from `begin`, which may be a coroutine function, until `is_over`."""
    started_s = time.thread_time()
    begun = begin()
    task = asyncio.ensure_future(begun) if inspect.isawaitable(begun) else None
    longest_s = 0.0
    while not is_over() or (task is not None and not task.done()):
        await asyncio.sleep(0)
        now_s = time.thread_time()
        longest_s, started_s = max(longest_s, now_s - started_s), now_s
    if task is not None:
        await task
    return longest_s


async def settle() -> None:
    for _ in range(_SETTLE_TURNS):
        await asyncio.sleep(0)


async def measure(in_flight: int) -> dict[str, float]:
    owner = await AppBench().open()
    other = await AppBench(owner.server, OTHER).open()
    for seq_id in range(1, in_flight + 1):
        await owner.submit(seq_id)
    polls = [asyncio.create_task(other.retrieve(request_id(seq_id))) for seq_id in range(1, in_flight + 1)]
    await settle()
    assert len(other.waiters) == in_flight
    # A worker collects garbage rarely; here a single collection would decide the figure.
    gc.disable()
    return {
        "subscriptions were lost: every poll looks again": await looks_again(other, in_flight),
        "the store was wiped: every sample is entered again": await refills(owner),
        "the worker leaves: every poll is sent back": await sends_back(other, polls),
        "a session ends: all its samples are cancelled": await ends(owner),
    }


async def looks_again(worker: AppBench, in_flight: int) -> float:
    read, reads = worker.store.read, []
    worker.store.read = lambda key: reads.append(key) or read(key)  # type: ignore[method-assign,func-returns-value]
    longest_s = await longest_turn_s(worker.waiters.look_again, lambda: len(reads) == in_flight)
    await settle()
    return longest_s


async def refills(worker: AppBench) -> float:
    await worker.housekeeping.tend_store()
    worker.server.wipe()
    return await longest_turn_s(worker.housekeeping.tend_store, lambda: True)


async def sends_back(worker: AppBench, polls: list[asyncio.Task[Answered]]) -> float:
    longest_s = await longest_turn_s(worker.waiters.send_back, lambda: not len(worker.waiters))
    await asyncio.gather(*polls)
    return longest_s


async def ends(worker: AppBench) -> float:
    end = partial(worker.dispatcher.end_session, SESSION_ID)
    return await longest_turn_s(end, lambda: worker.dispatcher.in_flight == 0)


def main() -> None:
    parser = argparse.ArgumentParser(description="The longest turn of a worker's loop, in CPU time.")
    parser.add_argument("--in-flight", type=int, default=16_384)
    in_flight = parser.parse_args().in_flight
    for name, longest_s in uvloop.run(measure(in_flight)).items():
        sys.stdout.write(f"{longest_s * 1000:7.1f} ms  {name}\n")


if __name__ == "__main__":
    main()
