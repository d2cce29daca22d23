"""The table of targets: the runs, the figures read from a report, and the verdicts."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from benchmarks import run
from benchmarks.macro import bench_runs, rows
from gateway.bench.scenario import resolve


def report(cpu_ms: float | None = 0.5, peak_mib: float = 100, concurrency: int = 512) -> dict[str, Any]:
    return {
        "samples": {"completed": 1_000},
        "samples_per_second": 750.0,
        "gateway": {
            "cpu_ms_per_sample": cpu_ms,
            "peak_rss_bytes": peak_mib * rows.MIB,
            "peak_rss_bytes_per_worker": peak_mib * rows.MIB,
            "healthz_ms": {"p99": 12.0},
        },
        "client": {"cpu_ms_per_sample": 0.3},
        "redis": {"cpu_seconds": 0.03, "commands_per_sample": 4.1},
        "config": {"concurrency": concurrency},
    }


@pytest.mark.parametrize("row", rows.ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize("quick", [False, True])
def test_every_row_is_a_run_that_bench_takes(row: rows.Row, quick: bool) -> None:
    chosen = row.quick() if quick else row
    words = chosen.arguments()
    given = {
        flag.removeprefix("--").replace("-", "_"): int(number)
        for flag, number in pairwise(words)
        if flag.startswith("--") and number.isdecimal()
    }
    assert resolve(None, given).samples == chosen.samples
    assert chosen.samples <= row.samples
    assert not quick or chosen.samples * chosen.max_tokens <= 2_000_000


def test_every_target_is_of_a_row_and_every_row_has_a_name_of_its_own() -> None:
    names = [row.name for row in rows.ROWS]
    assert len(names) == len(set(names))
    assert {target.row for target in rows.TARGETS} | {target.relative_to for target in rows.TARGETS} - {None} <= {
        *names
    }


def test_the_least_of_the_rounds_is_what_counts() -> None:
    target = rows.Target("small", "a", rows.cpu_ms, 0.4, "ms")
    verdict = rows.judge(target, {"a": [report(0.6), report(0.39), report(0.5)]})
    assert (verdict.least, verdict.median, verdict.met) == (0.39, 0.5, True)
    assert rows.judge(target, {"a": [report(0.41)]}).met is False


def test_a_relative_target_follows_the_other_row() -> None:
    target = rows.Target("small", "a", rows.cpu_ms, 1.5, "ms", relative_to="b")
    found = {"a": [report(0.7)], "b": [report(0.5), report(0.8)]}
    assert rows.judge(target, found).limit == 0.75
    assert rows.judge(target, found).met is True
    assert rows.judge(target, {"a": found["a"]}).met is None


def test_what_was_not_measured_is_not_met_either() -> None:
    target = rows.Target("small", "a", rows.cpu_ms, 1.5, "ms")
    verdict = rows.judge(target, {"a": [report(None)]})
    assert (verdict.least, verdict.met) == (None, None)


def test_figures_of_a_report() -> None:
    assert rows.redis_cpu_us(report()) == pytest.approx(30.0)
    assert rows.redis_commands(report()) == 4.1
    assert rows.worker_mib(report()) == 100
    assert rows.healthz_p99_ms(report()) == 12.0
    assert rows.memory_bytes_per_in_flight(report(), report(peak_mib=110, concurrency=1_536)) == 10 * rows.MIB / 1_024
    assert rows.memory_bytes_per_in_flight(report(), report()) is None


def test_the_tables_tell_only_what_was_run() -> None:
    found = {"small-512": [report(0.39), report(0.5)], "small-2048": []}
    told = bench_runs.targets_table(rows.TARGETS, found).splitlines()
    assert [line.split("|")[1].strip() for line in told[2:]] == ["small, 512 in flight", "worker memory, 512 in flight"]
    assert told[2].split("|")[-2].strip() == "yes"
    assert "0.39 ms" in bench_runs.details_table(found)
    assert "750 per second" in bench_runs.headline(report())


def test_names_choose_what_is_run() -> None:
    assert run.chosen(None, "micro", run.MICRO) == list(run.MICRO)
    assert run.chosen(["macro"], "micro", run.MICRO) == []
    assert run.chosen(["store", "small-512"], "micro", run.MICRO) == ["store"]
    assert run.chosen(["store", "small-512"], "macro", run.MACRO) == ["small-512"]
