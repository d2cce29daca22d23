"""What a set of processes took of the machine, and whether one of them could take no more. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gateway.bench.watch.procfs import ProcessUsage

# Of one core, between two looks. A process with one event loop above it has no time left to be late in.
SATURATED_SHARE: Final = 0.9
# The kernel counts in ticks of 10 ms: over less than this a share is mostly rounding.
SHORTEST_LOOK_S: Final = 0.2


@dataclass(slots=True)
class UsageLedger:
    """CPU, memory and descriptors of a set of processes that may come and go; fed with one look after another.

    `saturated_s`: how long the busiest of them had more than `SATURATED_SHARE` of a core. `spent`: of each look, when
    it was, and the CPU seconds of all of them from the first look until then.
    """

    peak_rss_bytes: int = 0
    peak_rss_bytes_per_process: int = 0
    peak_fds: int = 0
    spent: list[tuple[float, float]] = field(default_factory=list)
    _first: dict[int, float] = field(default_factory=dict)
    _last: dict[int, float] = field(default_factory=dict)
    _saturated_s: dict[int, float] = field(default_factory=dict)
    _looks: int = 0
    _looked_s: float = 0.0

    def look(self, processes: Mapping[int, ProcessUsage], at_s: float = 0.0) -> None:
        """`at_s`: monotonic; looks without it tell nothing of saturation."""
        self._judge(processes, at_s)
        for pid, usage in processes.items():
            # Who came after the first look started from nothing, under our eyes.
            self._first.setdefault(pid, usage.cpu_seconds if self._looks == 0 else 0.0)
            self._last[pid] = usage.cpu_seconds
        self._looks += 1
        self._looked_s = at_s
        self.spent.append((at_s, self.cpu_seconds or 0.0))
        self.peak_rss_bytes = max(self.peak_rss_bytes, sum(usage.rss_bytes for usage in processes.values()))
        self.peak_fds = max(self.peak_fds, sum(usage.fds for usage in processes.values()))
        largest = max((usage.rss_bytes for usage in processes.values()), default=0)
        self.peak_rss_bytes_per_process = max(self.peak_rss_bytes_per_process, largest)

    def _judge(self, processes: Mapping[int, ProcessUsage], at_s: float) -> None:
        passed_s = at_s - self._looked_s
        if not self._looks or passed_s < SHORTEST_LOOK_S:
            return
        for pid, usage in processes.items():
            if pid in self._last and usage.cpu_seconds - self._last[pid] > SATURATED_SHARE * passed_s:
                self._saturated_s[pid] = self._saturated_s.get(pid, 0.0) + passed_s

    @property
    def processes(self) -> int:
        return len(self._last)

    @property
    def cpu_seconds(self) -> float | None:
        """Spent between the first look and the last; None when nothing was ever seen."""
        if not self._last:
            return None
        return sum(last - self._first[pid] for pid, last in self._last.items())

    @property
    def saturated_s(self) -> float:
        return max(self._saturated_s.values(), default=0.0)


@dataclass(slots=True)
class MachineLedger:
    """CPU seconds that the whole machine spent, on whatever; fed like `UsageLedger`.

    `full_s`: how long nearly nothing of it was idle.
    """

    cpus: int
    full_s: float = 0.0
    _first: tuple[float, float] | None = None
    _last: tuple[float, float] = (0.0, 0.0)

    def look(self, busy_s: float, at_s: float) -> None:
        """`busy_s`: of all cores since the machine started."""
        if self._first is None:
            self._first = (busy_s, at_s)
        else:
            passed_s = at_s - self._last[1]
            if passed_s >= SHORTEST_LOOK_S and busy_s - self._last[0] > SATURATED_SHARE * self.cpus * passed_s:
                self.full_s += passed_s
        self._last = (busy_s, at_s)

    @property
    def busy_s(self) -> float:
        return self._last[0] - self._first[0] if self._first is not None else 0.0

    @property
    def looked_s(self) -> float:
        return self._last[1] - self._first[1] if self._first is not None else 0.0
