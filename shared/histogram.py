"""Latencies in buckets, four to a doubling, from half a millisecond to 35 minutes, the range of generations.

Adding is a list's `append`, cheap enough for the hot path. The values are put into their buckets when somebody takes a
snapshot, once a second in a worker. A quantile read from it is accurate within its bucket, that is, to 19 % or half a
millisecond: an upstream that is a third slower than another shows as slower.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_FIRST_S: Final = 0.0005
_DOUBLINGS: Final = 22
PER_DOUBLING: Final = 4
# Every `PER_DOUBLING`th bound is exactly the first one doubled: these are the bounds in `/metrics`.
BOUNDS_S: Final[tuple[float, ...]] = tuple(
    _FIRST_S * 2.0 ** (i / PER_DOUBLING) for i in range(_DOUBLINGS * PER_DOUBLING + 1)
)
# One count for each bound, one for values above the last, and the sum of all values in seconds.
FIELDS: Final = len(BOUNDS_S) + 2


class Histogram:
    """Count latencies by bucket. `add` takes seconds."""

    __slots__ = ("_counts", "_new_s", "_snapshot", "_sum_s", "add")

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0
        self._new_s: list[float] = []
        self._snapshot: tuple[float, ...] = (0.0,) * FIELDS
        self.add: Callable[[float], None] = self._new_s.append

    def snapshot(self) -> tuple[float, ...]:
        """Return `FIELDS` numbers that never fall: counts by bucket, the count above them, the sum in seconds."""
        if self._new_s:
            counts = self._counts
            for seconds in self._new_s:
                counts[bisect_left(BOUNDS_S, seconds)] += 1
            self._sum_s += sum(self._new_s)
            self._new_s.clear()
            self._snapshot = (*counts, round(self._sum_s, 6))
        return self._snapshot


def count(snapshot: Sequence[float]) -> int:
    return int(sum(snapshot[:-1]))


def quantile_s(snapshot: Sequence[float], q: float) -> float | None:
    """Return the `q`-th quantile (0..1) in seconds, linear within its bucket, or None if nothing was added.

    A value above the last bound is reported as the last bound.
    """
    below = [0.0, *accumulate(snapshot[:-1])]
    rank = q * below[-1]
    if rank == 0:
        return None
    bucket = bisect_left(below, rank) - 1
    if bucket >= len(BOUNDS_S):
        return BOUNDS_S[-1]
    low_s = BOUNDS_S[bucket - 1] if bucket else 0.0
    return low_s + (BOUNDS_S[bucket] - low_s) * (rank - below[bucket]) / snapshot[bucket]
