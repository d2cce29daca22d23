"""What `--chaos` breaks and when, and how long it took until the gateway served again. Pure.

A plan is text, `kill-worker@5,wipe-redis@12`: what, and how many seconds after the first sample. `random` draws one
from the run's seed, so that a run that failed is repeated by the line it printed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import TYPE_CHECKING, Final

from shared.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy as np
    import numpy.typing as npt


class ChaosFault(Enum):
    KILL_WORKER = "kill-worker"  # SIGKILL to one worker
    RESTART_REDIS = "restart-redis"  # saved, killed, started with what was saved
    WIPE_REDIS = "wipe-redis"  # killed, started empty
    STALL_REDIS = "stall-redis"  # stopped for a few seconds, then goes on
    KILL_UPSTREAM = "kill-upstream"  # SIGKILL to the simulated vLLM, and a new one on its port


@dataclass(frozen=True, slots=True)
class Planned:
    """`at_s`: after the first sample."""

    fault: ChaosFault
    at_s: float

    def __str__(self) -> str:
        return f"{self.fault.value}@{self.at_s:g}"


@dataclass(frozen=True, slots=True)
class Break:
    """A fault as it happened; times are monotonic seconds.

    `over_s`: when what was broken ran again; for a killed worker the kill itself, since the rest is the gateway's task.
    `ready_s`: when the slot of a killed worker was ready; None for other faults, and when it never was.
    `in_flight`: what a killed worker ran by its last report. Each may have been executed again since, and nobody is
    left to say so.
    """

    fault: ChaosFault
    began_s: float
    over_s: float
    ready_s: float | None = None
    in_flight: int = 0


_ITEM: Final = re.compile(r"([a-z-]+)@(\d+(?:\.\d+)?)")
_RANDOM: Final = re.compile(r"random(?:@(\d+(?:\.\d+)?))?")
# A small run is under way by then, and a fault in its first moments is the rarest of all.
_RANDOM_WITHIN_S: Final = 8.0
# How often `random` breaks each thing, at most; at least one fault is drawn.
_RANDOM_EACH: Final = 2
# Longer than any command takes, shorter than the 10 s after which a worker takes the server for dead.
STALL_S: Final = 4.0
# A server that is emptied while all workers die loses what only they knew: a documented limit, which is not drawn.
# Before the wipe it takes a moment until the death is told, and a stall on top; after it, until all is refilled.
_APART_BEFORE_S: Final = STALL_S + 2.0
_APART_AFTER_S: Final = 3.0


def make_plan(text: str, seed: int) -> tuple[Planned, ...]:
    """In order of time. `random` and `random@SECONDS` are drawn from `seed`. Raises `ConfigError`."""
    if not text:
        return ()
    if drawn := _RANDOM.fullmatch(text):
        return _draw(Random(f"chaos {seed}"), float(drawn[1] or _RANDOM_WITHIN_S))
    return _in_order(_parse_item(item.strip()) for item in text.split(","))


def shown(plan: tuple[Planned, ...]) -> str:
    """The text that makes this plan again."""
    return ",".join(map(str, plan))


def recovered_after_s(done: Break, spans: npt.NDArray[np.float64], promises: npt.NDArray[np.float64]) -> float | None:
    """Seconds from the end of the fault until the gateway served as before. None: never.

    `spans`, `promises`: float64[n, 2], monotonic seconds, submission and good result of each completed sample,
    submission and promise of each accepted one. A killed worker is recovered when its slot is ready; an upstream with
    the first result of a sample that was submitted since the fault began; Redis with the first result of any sample
    and the first promise of one submitted since, however long the upstream's queue is.
    """
    if done.fault is ChaosFault.KILL_WORKER:
        served_s = done.ready_s
    elif done.fault is ChaosFault.KILL_UPSTREAM:
        served_s = _first(spans, done.began_s, done.over_s)
    else:
        result_s = _first(spans, float("-inf"), done.over_s)
        promise_s = _first(promises, done.began_s, done.over_s)
        served_s = None if result_s is None else max(result_s, promise_s or result_s)
    return None if served_s is None else served_s - done.over_s


def _first(pairs: npt.NDArray[np.float64], begun_since_s: float, ended_since_s: float) -> float | None:
    """The earliest end of a pair that began and ended since then."""
    fresh = pairs[(pairs[:, 0] >= begun_since_s) & (pairs[:, 1] >= ended_since_s), 1]
    return float(fresh.min()) if fresh.size else None


def _parse_item(item: str) -> Planned:
    match = _ITEM.fullmatch(item)
    names = [fault.value for fault in ChaosFault]
    if match is None or match[1] not in names:
        allowed = ", ".join(names)
        raise ConfigError(f"--chaos {item!r}: must be WHAT@SECONDS with WHAT one of {allowed}; or random")
    return Planned(ChaosFault(match[1]), float(match[2]))


def is_beyond_limit(plan: tuple[Planned, ...]) -> bool:
    """Whether two workers die together with what Redis keeps: nobody may be left who could tell what was lost."""
    wipes = [at_s for planned, at_s in _as_it_happens(plan) if planned.fault is ChaosFault.WIPE_REDIS]
    kills = [planned.at_s for planned in plan if planned.fault is ChaosFault.KILL_WORKER]
    return any(sum(-_APART_BEFORE_S < kill_s - wipe_s < _APART_AFTER_S for kill_s in kills) > 1 for wipe_s in wipes)


def _as_it_happens(plan: tuple[Planned, ...]) -> Iterator[tuple[Planned, float]]:
    """The faults of Redis with their real beginnings: one at a time."""
    free_s = 0.0
    for planned in plan:
        if planned.fault in (ChaosFault.RESTART_REDIS, ChaosFault.WIPE_REDIS, ChaosFault.STALL_REDIS):
            at_s = max(planned.at_s, free_s)
            free_s = at_s + (STALL_S if planned.fault is ChaosFault.STALL_REDIS else 0.0)
            yield planned, at_s


def _draw(rng: Random, within_s: float) -> tuple[Planned, ...]:
    while is_beyond_limit(plan := _draw_any(rng, within_s)):
        continue
    return plan


def _draw_any(rng: Random, within_s: float) -> tuple[Planned, ...]:
    faults = [fault for fault in ChaosFault for _ in range(rng.randint(0, _RANDOM_EACH))] or [
        rng.choice(list(ChaosFault))
    ]
    return _in_order(Planned(fault, round(rng.uniform(0.0, within_s), 1)) for fault in faults)


def _in_order(plan: Iterable[Planned]) -> tuple[Planned, ...]:
    return tuple(sorted(plan, key=lambda planned: planned.at_s))
