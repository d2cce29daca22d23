"""Plan what `--chaos` breaks and when, and compute how long the gateway took to recover. Pure.

A plan is text such as `kill-worker@5,wipe-redis@12`: a fault, and how many seconds after the first sample it comes.
`random` draws a plan from the run's seed, so the seed that a failed run printed repeats it.
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
    RESTART_REDIS = "restart-redis"  # save, kill, and start again with the saved data
    WIPE_REDIS = "wipe-redis"  # kill, and start again empty
    STALL_REDIS = "stall-redis"  # stop for a few seconds, then continue
    KILL_UPSTREAM = "kill-upstream"  # SIGKILL to the simulated vLLM, then a new one on its port


@dataclass(frozen=True, slots=True)
class Planned:
    """A planned fault. `at_s` counts from the first sample."""

    fault: ChaosFault
    at_s: float

    def __str__(self) -> str:
        return f"{self.fault.value}@{self.at_s:g}"


@dataclass(frozen=True, slots=True)
class Break:
    """A fault as it happened; times are monotonic seconds.

    `over_s` is when the broken part ran again; for a killed worker it is the kill, since recovery is the gateway's job.
    `ready_s` is when the slot of a killed worker was ready again; None for other faults, and if it never was.
    `in_flight` is the number of samples that a killed worker had in its last report. Each may have been executed again
    without being counted.
    """

    fault: ChaosFault
    began_s: float
    over_s: float
    ready_s: float | None = None
    in_flight: int = 0


_ITEM: Final = re.compile(r"([a-z-]+)@(\d+(?:\.\d+)?)")
_RANDOM: Final = re.compile(r"random(?:@(\d+(?:\.\d+)?))?")
# Even a small run still lasts this long.
_RANDOM_WITHIN_S: Final = 8.0
# `random` draws each fault at most this often, and at least one fault altogether.
_RANDOM_EACH: Final = 2
# Longer than any command takes, shorter than the 10 s after which a worker considers the server dead.
STALL_S: Final = 4.0
# If Redis is emptied while all workers die, what only they knew is lost: a documented limit, so it is never drawn.
# Before the wipe, reporting a death takes a moment plus a stall; after the wipe, the refill has to finish.
_APART_BEFORE_S: Final = STALL_S + 2.0
_APART_AFTER_S: Final = 3.0


def make_plan(text: str, seed: int) -> tuple[Planned, ...]:
    """Parse a plan and sort it by time; draw `random` and `random@SECONDS` from `seed`. Raises `ConfigError`."""
    if not text:
        return ()
    if drawn := _RANDOM.fullmatch(text):
        return _draw(Random(f"chaos {seed}"), float(drawn[1] or _RANDOM_WITHIN_S))
    return _in_order(_parse_item(item.strip()) for item in text.split(","))


def shown(plan: tuple[Planned, ...]) -> str:
    """Return the text that `make_plan` turns into this plan."""
    return ",".join(map(str, plan))


def recovered_after_s(done: Break, spans: npt.NDArray[np.float64], promises: npt.NDArray[np.float64]) -> float | None:
    """Return the seconds from the end of the fault until the gateway served again, or None if it never did.

    `spans` and `promises` are float64[n, 2] in monotonic seconds: submission and result of each completed sample, and
    submission and promise of each accepted one. A worker has recovered when its slot is ready; an upstream, with the
    first result of a sample submitted after the fault began; Redis, with the first result of any sample and the first
    promise of one submitted after the fault began, however long the upstream's queue is.
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
    """Return the earliest end among the pairs that began and ended after the given times."""
    ends_s = pairs[(pairs[:, 0] >= begun_since_s) & (pairs[:, 1] >= ended_since_s), 1]
    return float(ends_s.min()) if ends_s.size else None


def _parse_item(item: str) -> Planned:
    match = _ITEM.fullmatch(item)
    names = [fault.value for fault in ChaosFault]
    if match is None or match[1] not in names:
        allowed = ", ".join(names)
        raise ConfigError(
            f"--chaos: {item!r} is not allowed; give random, or WHAT@SECONDS, where WHAT is one of {allowed}"
        )
    return Planned(ChaosFault(match[1]), float(match[2]))


def is_beyond_limit(plan: tuple[Planned, ...]) -> bool:
    """Return whether two workers die around the time Redis is emptied, so that samples could vanish unseen."""
    wipes = [at_s for planned, at_s in _as_it_happens(plan) if planned.fault is ChaosFault.WIPE_REDIS]
    kills = [planned.at_s for planned in plan if planned.fault is ChaosFault.KILL_WORKER]
    return any(sum(-_APART_BEFORE_S < kill_s - wipe_s < _APART_AFTER_S for kill_s in kills) > 1 for wipe_s in wipes)


def _as_it_happens(plan: tuple[Planned, ...]) -> Iterator[tuple[Planned, float]]:
    """Yield the faults of Redis with the times at which they really begin, since they come one at a time."""
    free_s = 0.0
    for planned in plan:
        if planned.fault in (ChaosFault.RESTART_REDIS, ChaosFault.WIPE_REDIS, ChaosFault.STALL_REDIS):
            at_s = max(planned.at_s, free_s)
            free_s = at_s + (STALL_S if planned.fault is ChaosFault.STALL_REDIS else 0.0)
            yield planned, at_s


def _draw(rng: Random, within_s: float) -> tuple[Planned, ...]:
    """Draw plans until one stays within the documented limit."""
    while True:
        faults = [fault for fault in ChaosFault for _ in range(rng.randint(0, _RANDOM_EACH))]
        faults = faults or [rng.choice(list(ChaosFault))]
        plan = _in_order(Planned(fault, round(rng.uniform(0.0, within_s), 1)) for fault in faults)
        if not is_beyond_limit(plan):
            return plan


def _in_order(plan: Iterable[Planned]) -> tuple[Planned, ...]:
    return tuple(sorted(plan, key=lambda planned: planned.at_s))
