"""CPU, memory and descriptors of the processes of a run, and whether the gateway set the pace of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gateway.bench.watch.procfs import ProcessUsage

# Share of one core between two looks. A process with one event loop that uses more is always late.
SATURATED_SHARE: Final = 0.9
# The kernel counts CPU in ticks of 10 ms; over a shorter interval a share is mostly rounding error.
SHORTEST_LOOK_S: Final = 0.2
# A warning needs this share of the run's time; anything shorter is the start or the end, and changes no figure.
_NOTICED_SHARE: Final = 0.1


@dataclass(slots=True)
class UsageLedger:
    """Add up the usage of a set of processes that may come and go, one look after another.

    `saturated_s` is how long the busiest process used more than `SATURATED_SHARE` of a core. `spent` holds a pair for
    each look: its time, and the CPU seconds of all processes from the first look until then.
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
        """Take one look. `at_s` is monotonic; without it, saturation stays unknown."""
        passed_s = at_s - self._looked_s
        if self._looks and passed_s >= SHORTEST_LOOK_S:
            for pid, usage in processes.items():
                if pid in self._last and usage.cpu_seconds - self._last[pid] > SATURATED_SHARE * passed_s:
                    self._saturated_s[pid] = self._saturated_s.get(pid, 0.0) + passed_s
        for pid, usage in processes.items():
            # A process that appears after the first look began at zero during the run.
            self._first.setdefault(pid, usage.cpu_seconds if self._looks == 0 else 0.0)
            self._last[pid] = usage.cpu_seconds
        self._looks += 1
        self._looked_s = at_s
        self.spent.append((at_s, self.cpu_seconds or 0.0))
        self.peak_rss_bytes = max(self.peak_rss_bytes, sum(usage.rss_bytes for usage in processes.values()))
        self.peak_fds = max(self.peak_fds, sum(usage.fds for usage in processes.values()))
        largest = max((usage.rss_bytes for usage in processes.values()), default=0)
        self.peak_rss_bytes_per_process = max(self.peak_rss_bytes_per_process, largest)

    @property
    def processes(self) -> int:
        return len(self._last)

    @property
    def cpu_seconds(self) -> float | None:
        """Return the CPU spent between the first look and the last, or None if no process was ever seen."""
        if not self._last:
            return None
        return sum(last - self._first[pid] for pid, last in self._last.items())

    @property
    def saturated_s(self) -> float:
        return max(self._saturated_s.values(), default=0.0)


@dataclass(slots=True)
class MachineLedger:
    """Add up the CPU of the whole machine, whoever used it; fed like `UsageLedger`.

    `full_s` is how long almost no core was idle.
    """

    cpus: int
    full_s: float = 0.0
    _first: tuple[float, float] | None = None
    _last: tuple[float, float] = (0.0, 0.0)

    def look(self, busy_s: float, at_s: float) -> None:
        """Take one look. `busy_s` is the CPU time of all cores since the machine started."""
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


@dataclass(frozen=True, slots=True)
class RunUsage:
    """The CPU of everything that belongs to a run, and of the machine below it."""

    clients: UsageLedger
    simulators: UsageLedger
    ours: tuple[UsageLedger, ...]  # all processes of the run, clients and simulators included
    machine: MachineLedger
    listen_overflows: int = 0  # of the whole machine


def warnings_of(run: RunUsage) -> list[str]:
    """Return one sentence for each thing other than the gateway that may have set the pace of the run."""
    looked_s = run.machine.looked_s
    if looked_s <= 0:
        return []
    noticed_s = _NOTICED_SHARE * looked_s
    warnings = []
    for what, flag, ledger in (
        ("a load client", "--client-processes", run.clients),
        ("a simulated vLLM", "--simulator-processes", run.simulators),
    ):
        if ledger.saturated_s >= noticed_s:
            warnings.append(
                f"{what} used more than {SATURATED_SHARE:.0%} of a core for {ledger.saturated_s:.1f} of {looked_s:.1f} "
                f"s and may have set the pace; increase {flag}"
            )
    if run.machine.full_s >= noticed_s:
        warnings.append(
            f"all {run.machine.cpus} cores were busy for {run.machine.full_s:.1f} of {looked_s:.1f} s: "
            "rates and latencies are those of the machine; CPU per sample is the gateway's"
        )
    # A process that ends between two looks counts as another program; nothing in a run is that short.
    others = (run.machine.busy_s - sum(ledger.cpu_seconds or 0.0 for ledger in run.ours)) / looked_s
    if others >= _NOTICED_SHARE * run.machine.cpus:
        warnings.append(f"other programs used {others:.1f} of the machine's {run.machine.cpus} cores during the run")
    if run.listen_overflows:
        warnings.append(
            f"{run.listen_overflows:,} connection attempts met a full accept queue (net.core.somaxconn) on this "
            "machine; each waits a second or more until the kernel tries again"
        )
    return warnings
