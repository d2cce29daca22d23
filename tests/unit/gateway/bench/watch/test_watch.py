"""Observations from looks at processes and from /status."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

import pytest

from gateway.bench.report.outcome import build_series
from gateway.bench.watch import procfs
from gateway.bench.watch.procfs import ProcessUsage
from gateway.bench.watch.usage import UsageLedger
from gateway.bench.watch.watch import Observations, probed
from tests.bench_made import client, facts_of
from tests.waiting import until


def usage(cpu_seconds: float, rss_bytes: int = 0, fds: int = 0) -> ProcessUsage:
    return ProcessUsage(cpu_seconds, rss_bytes, fds)


def test_cpu_is_counted_from_the_first_look() -> None:
    ledger = UsageLedger()
    ledger.look({1: usage(5.0), 2: usage(1.0)})
    ledger.look({1: usage(6.0), 2: usage(1.5)})
    assert ledger.cpu_seconds == 1.5


def test_a_worker_that_died_keeps_its_cpu_and_its_successor_starts_from_nothing() -> None:
    ledger = UsageLedger()
    ledger.look({1: usage(5.0)})
    ledger.look({1: usage(7.0)})
    ledger.look({2: usage(0.5)})
    assert ledger.cpu_seconds == 2.5
    assert ledger.processes == 2


def test_peaks_are_of_one_moment() -> None:
    ledger = UsageLedger()
    ledger.look({1: usage(0, 100, 10), 2: usage(0, 50, 20)})
    ledger.look({1: usage(0, 20, 5), 2: usage(0, 120, 4)})
    assert (ledger.peak_rss_bytes, ledger.peak_rss_bytes_per_process, ledger.peak_fds) == (150, 120, 30)


def test_nothing_seen_is_no_figure() -> None:
    ledger = UsageLedger()
    ledger.look({})
    assert ledger.cpu_seconds is None


def test_status_pages_are_read_as_far_as_they_go() -> None:
    seen = Observations()
    seen.take_status({})
    me = os.getpid()
    seen.take_status({"workers": [{"pid": me, "loop_lag_ms_p99": 3.0}], "redis": {"used_bytes": 10}})
    seen.take_status({"workers": [{"pid": me, "loop_lag_ms_p99": 2.0, "loop_lag_ms_max": 8.0}], "redis": None})
    assert seen.first_status == {}
    assert seen.redis_peak_bytes == 10
    assert (max(seen.loop_lag_ms_p99), seen.loop_lag_ms_max) == (3.0, 8.0)
    assert seen.workers.processes == 1


def test_an_unanswered_probe_is_in_no_latency_and_is_drawn_all_the_same() -> None:
    seen = Observations()
    seen.take_health(11.0, 10.0, answered=False)
    seen.take_health(21.5, 0.002, answered=True)
    assert (seen.healthz_ms, seen.healthz_failures) == ([2.0], 1)
    drawn = build_series(replace(facts_of(client()), started_s=10.0), seen).health_s
    assert drawn.tolist() == [[1.0, 10.0], [11.5, 0.002]]


def test_an_upstream_is_probed_once_either_answer_is_known() -> None:
    assert probed({"upstreams": [{"logprobs_scale": True}, {"logprobs_scale": False}]})
    assert not probed({"upstreams": [{"logprobs_scale": True}, {"logprobs_scale": None}]})
    assert not probed({"upstreams": [{}]})
    assert not probed({"upstreams": []})
    assert not probed({})


def test_our_own_process_has_cpu_memory_and_descriptors() -> None:
    mine = procfs.usage(os.getpid())
    assert mine is not None
    assert mine.cpu_seconds > 0
    assert mine.rss_bytes > 1_000_000
    assert mine.fds >= 3


async def test_children_are_found_by_their_name() -> None:
    child = await asyncio.create_subprocess_exec("sleep", "60")
    try:
        # The kernel closes what tells of a program's start before it gives the process its name.
        await until(lambda: procfs.children_named(os.getpid(), ("sleep",)) == [child.pid])
        assert procfs.children_named(os.getpid(), ("sleepless",)) == []
    finally:
        child.kill()
        await child.wait()
    assert procfs.children_named(2**22 + 1, ("sleep",)) == []


def test_a_process_that_is_gone_is_none() -> None:
    assert procfs.usage(2**22 + 1) is None


@pytest.mark.parametrize("name", ["python", "a b", "odd) name (", "((("])
def test_cpu_is_found_behind_any_name(name: str) -> None:
    fields = " ".join(str(n) for n in range(4, 52))
    ticks = os.sysconf("SC_CLK_TCK")
    assert procfs.cpu_seconds(f"77 ({name}) S {fields}") == (14 + 15) / ticks
