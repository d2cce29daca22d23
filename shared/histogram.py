"""Latencies in buckets that double, from half a millisecond to 35 minutes: what a generation may take.

Adding is an `append`, so that it may stand on the hot path; what was added is put into its buckets when somebody looks,
once a second in a worker. A quantile read from it is right within its bucket, that is, to a factor of two; a dashboard
needs no more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_FIRST_S: Final = 0.0005
_BUCKETS: Final = 23
BOUNDS_S: Final[tuple[float, ...]] = tuple(_FIRST_S * float(2**i) for i in range(_BUCKETS))
_PER_SECOND: Final = round(1 / _FIRST_S)
# Longer than any process lives: no index needs to be checked when adding.
_SLOTS: Final = 64
# One count for each bound, one for what lies above the last, and the sum of all in seconds.
FIELDS: Final = _BUCKETS + 2


class Histogram:
    __slots__ = ("_counts", "_new_s", "_sum_s", "add")

    def __init__(self) -> None:
        self._counts = [0] * _SLOTS
        self._sum_s = 0.0
        self._new_s: list[float] = []
        self.add: Callable[[float], None] = self._new_s.append

    def snapshot(self) -> tuple[float, ...]:
        """`FIELDS` numbers that never fall: counts by bucket, the count above them, the sum in seconds."""
        for seconds in self._new_s:
            # The scale divided by what doubles.
            self._counts[int(seconds * _PER_SECOND).bit_length()] += 1
        self._sum_s += sum(self._new_s)
        self._new_s.clear()
        return (*self._counts[:_BUCKETS], sum(self._counts[_BUCKETS:]), round(self._sum_s, 6))


def count(snapshot: Sequence[float]) -> int:
    return int(sum(snapshot[:-1]))


def quantile_s(snapshot: Sequence[float], q: float) -> float | None:
    """The `q`-th quantile (0..1) in seconds, linear within its bucket; None when nothing was added.

    What lies above the last bound is told as the last bound.
    """
    rank = q * count(snapshot)
    if rank == 0:
        return None
    below, low_s = 0.0, 0.0
    for bound_s, in_bucket in zip(BOUNDS_S, snapshot, strict=False):
        if below + in_bucket >= rank:
            return low_s + (bound_s - low_s) * (rank - below) / in_bucket
        below, low_s = below + in_bucket, bound_s
    return BOUNDS_S[-1]
