"""CPU of processes and of the machine, and the warnings that follow from it."""

from __future__ import annotations

import pytest

from gateway.bench.watch.procfs import (
    ProcessUsage,
    busy_seconds,
    cpus,
    listen_overflows,
    machine_busy_seconds,
    netstat_value,
)
from gateway.bench.watch.usage import MachineLedger, RunUsage, UsageLedger, warnings_of


def looked_at(*cpu_seconds: float, every_s: float = 1.0) -> UsageLedger:
    """Return the ledger of one process that had spent these CPU seconds at each look."""
    ledger = UsageLedger()
    for number, spent_s in enumerate(cpu_seconds):
        ledger.look({7: ProcessUsage(spent_s, 0, 0)}, 100.0 + number * every_s)
    return ledger


def machine(*busy_s: float, cores: int = 2) -> MachineLedger:
    ledger = MachineLedger(cores)
    for number, spent_s in enumerate(busy_s):
        ledger.look(spent_s, 100.0 + number)
    return ledger


def warnings(clients: UsageLedger, simulators: UsageLedger, below: MachineLedger, *others: UsageLedger) -> list[str]:
    return warnings_of(RunUsage(clients, simulators, (clients, simulators, *others), below))


def test_only_looks_with_nearly_a_whole_core_count() -> None:
    assert looked_at(5.0, 5.95, 6.8, 7.75).saturated_s == 2.0
    assert looked_at(5.0, 5.8, 6.6).saturated_s == 0.0


def test_the_busiest_process_counts_and_not_their_sum() -> None:
    ledger = UsageLedger()
    for number in range(3):
        ledger.look({1: ProcessUsage(0.5 * number, 0, 0), 2: ProcessUsage(0.6 * number, 0, 0)}, float(number))
    assert ledger.saturated_s == 0.0


def test_two_looks_at_nearly_the_same_moment_tell_nothing() -> None:
    assert looked_at(1.0, 1.1, 1.2, every_s=0.05).saturated_s == 0.0


def test_what_was_spent_is_kept_look_by_look() -> None:
    assert looked_at(5.0, 5.5, 6.5).spent == [(100.0, 0.0), (101.0, 0.5), (102.0, 1.5)]


def test_the_machine_is_full_when_no_core_is_left() -> None:
    ledger = machine(1000.0, 1001.9, 1002.9, 1004.8)
    assert (ledger.full_s, ledger.looked_s) == (2.0, 3.0)
    assert ledger.busy_s == pytest.approx(4.8)
    assert (machine().busy_s, machine().looked_s) == (0.0, 0.0)


def test_a_run_that_left_room_everywhere_is_not_warned_of() -> None:
    assert warnings(looked_at(0.0, 0.3, 0.6), looked_at(0.0, 0.5, 1.0), machine(0.0, 0.8, 1.6)) == []


def test_who_may_have_set_the_pace_is_named() -> None:
    idle, busy = looked_at(0.0, 0.1, 0.2), looked_at(0.0, 0.99, 1.98)
    [client] = warnings(busy, idle, machine(0.0, 1.1, 2.2))
    assert client.startswith("a load client used more than 90% of a core for 2.0 of 2.0 s")
    [simulator] = warnings(idle, busy, machine(0.0, 1.1, 2.2))
    assert simulator.startswith("a simulated vLLM")
    [full] = warnings(idle, idle, machine(0.0, 1.95, 3.9), looked_at(0.0, 1.8, 3.6))
    assert full.startswith("all 2 cores were busy for 2.0 of 2.0 s")
    [others] = warnings(idle, idle, machine(0.0, 1.2, 2.4))
    assert others == "other programs used 1.0 of the machine's 2 cores during the run"


def test_full_accept_queues_are_told_since_they_look_like_a_slow_gateway() -> None:
    idle = looked_at(0.0, 0.1, 0.2)
    [warning] = warnings_of(RunUsage(idle, idle, (idle,), machine(0.0, 0.1, 0.2), listen_overflows=1234))
    assert warning.startswith("1,234 connection attempts met a full accept queue")


def test_values_of_netstat_stand_below_their_names() -> None:
    text = "TcpExt: A ListenOverflows B\nTcpExt: 1 22 3\nIpExt: C\nIpExt: 4\n"
    assert netstat_value(text, "ListenOverflows") == 22
    assert netstat_value(text, "C") == 4
    assert netstat_value(text, "D") is None
    assert (listen_overflows() or 0) >= 0


def test_a_short_squeeze_in_a_long_run_is_no_news() -> None:
    seconds = [0.0, 1.0, *(1.0 + 0.1 * step for step in range(1, 30))]
    assert warnings(looked_at(*seconds), looked_at(0.0), machine(*seconds)) == []


def test_a_run_that_was_never_looked_at_is_not_judged() -> None:
    assert warnings(UsageLedger(), UsageLedger(), machine(5.0)) == []


def test_idle_and_waiting_for_disks_are_not_busy() -> None:
    stat = "cpu  100 20 30 4000 500 6 7 8 0 0\ncpu0 1 2 3\n"
    assert busy_seconds(stat) == pytest.approx(1.71)
    assert machine_busy_seconds() > 0
    assert cpus() >= 1
