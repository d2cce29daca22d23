"""Measure the CPU of this process per call, for several ways of doing one thing that take turns.

Other processes slow a machine down from one second to the next. So the ways take turns within a round, the order
rotates, and a ratio is the median of the ratios of each round: a disturbance of a round affects both sides. The least
of the rounds is the cost without disturbance, the median the cost as seen.
"""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence


class WrongResult(Exception):
    """A contender does not do what it is measured for."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One way. `work(calls)` does the thing that many times, and raises `WrongResult` if it failed."""

    name: str
    work: Callable[[int], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to do; the gateway's way comes first, then the baselines."""

    name: str
    calls: int
    contenders: Sequence[Contender]


@dataclass(frozen=True, slots=True)
class Figure:
    """The cost of one contender. `ratio` is relative to the case's first contender, and None for that one."""

    case: str
    contender: str
    calls: int
    rounds: int
    least_us: float
    median_us: float
    ratio: float | None


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to do. `quick` is for tests; its figures say nothing."""

    rounds: int = 7
    quick: bool = False

    def calls(self, usual: int) -> int:
        return max(1, usual // 50) if self.quick else usual


@dataclass(slots=True)
class Findings:
    """The results of one part. `notes` are sentences: what was left out, and what else to know."""

    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def each_time(once: Callable[[], object]) -> Callable[[int], Awaitable[None]]:
    """Turn a plain function into work."""

    async def work(calls: int) -> None:
        for _ in range(calls):
            once()

    return work


async def measure(case: Case, rounds: int) -> list[Figure]:
    """Return one figure per contender, in their order. Raises what their work raises."""
    for contender in case.contenders:
        await contender.work(max(1, case.calls // 10))
    costs_us: list[list[float]] = [[] for _ in case.contenders]
    for number in range(rounds):
        for index in rotated(len(case.contenders), number):
            costs_us[index].append(await _turn_us(case.contenders[index], case.calls))
    return [
        figure(case, contender.name, costs, costs_us[0] if index else None)
        for index, (contender, costs) in enumerate(zip(case.contenders, costs_us, strict=True))
    ]


async def _turn_us(contender: Contender, calls: int) -> float:
    gc.collect()
    began_s = time.process_time()
    await contender.work(calls)
    return (time.process_time() - began_s) * 1e6 / calls


def rotated(count: int, by: int) -> list[int]:
    """Return 0..count-1, beginning at `by`."""
    return [(by + offset) % count for offset in range(count)]


def figure(case: Case, name: str, costs_us: Sequence[float], ours_us: Sequence[float] | None) -> Figure:
    """Build one figure. `ours_us` holds the costs of the first contender in the same rounds."""
    ratio = None
    if ours_us is not None:
        ratio = statistics.median(theirs / ours for theirs, ours in zip(costs_us, ours_us, strict=True))
    return Figure(case.name, name, case.calls, len(costs_us), min(costs_us), statistics.median(costs_us), ratio)
