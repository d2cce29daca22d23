"""Was it the gateway that was measured? What else may have set the pace of a run, one sentence each. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gateway.bench.watch.usage import SATURATED_SHARE

if TYPE_CHECKING:
    from gateway.bench.watch.usage import MachineLedger, UsageLedger

# Of a run's time: less than this is a start or an end, and moves no figure.
_NOTICED_SHARE: Final = 0.1


@dataclass(frozen=True, slots=True)
class RunUsage:
    """CPU of everything that belongs to a run, and of the machine below it."""

    clients: UsageLedger
    simulators: UsageLedger
    ours: tuple[UsageLedger, ...]  # all of the run's processes, those two among them
    machine: MachineLedger
    listen_overflows: int = 0  # of the whole machine


def warnings_of(load: RunUsage) -> list[str]:
    """Empty when neither client, nor simulator, nor the machine was short of CPU."""
    looked_s = load.machine.looked_s
    if looked_s <= 0:
        return []
    told = [
        _saturated("a load client", "give it more --client-processes", load.clients, looked_s),
        _saturated("a simulated vLLM", "give it more --simulator-processes", load.simulators, looked_s),
        _full(load.machine, looked_s),
        _others(load, looked_s),
        _overflows(load.listen_overflows),
    ]
    return [sentence for sentence in told if sentence]


def _saturated(who: str, advice: str, ledger: UsageLedger, looked_s: float) -> str:
    if ledger.saturated_s < _NOTICED_SHARE * looked_s:
        return ""
    return (
        f"{who} took more than {SATURATED_SHARE:.0%} of a core for {ledger.saturated_s:.1f} of {looked_s:.1f} s "
        f"and may have set the pace; {advice}"
    )


def _full(machine: MachineLedger, looked_s: float) -> str:
    if machine.full_s < _NOTICED_SHARE * looked_s:
        return ""
    return (
        f"all {machine.cpus} cores were busy for {machine.full_s:.1f} of {looked_s:.1f} s: "
        "rates and latencies are those of the machine, CPU per sample is the gateway's"
    )


def _others(load: RunUsage, looked_s: float) -> str:
    """What ended between two looks is counted as somebody else's; nothing of a run is that short."""
    ours_s = sum(ledger.cpu_seconds or 0.0 for ledger in load.ours)
    others = (load.machine.busy_s - ours_s) / looked_s
    if others < _NOTICED_SHARE * load.machine.cpus:
        return ""
    return f"other programs took {others:.1f} of the machine's {load.machine.cpus} cores meanwhile"


def _overflows(count: int) -> str:
    if not count:
        return ""
    return (
        f"{count:,} connection attempts met a full accept queue (net.core.somaxconn) on this machine; "
        "each waits a second or more until the kernel tries again"
    )
