"""One report of one run, or of several."""

from __future__ import annotations

import json

from gateway.bench.report import report
from gateway.bench.report.report import runs_exit_code, runs_to_json
from tests.bench_made import client, made, measured_run


def test_a_single_run_is_reported_as_it_is() -> None:
    only = made(client(completed=10))
    assert runs_to_json([only]) == report.to_json(only)


def test_several_runs_keep_their_order() -> None:
    reports = [measured_run(concurrency).report for concurrency in (512, 128)]
    told = json.loads(runs_to_json(reports))
    assert set(told) == {"runs"}
    assert [run["config"]["concurrency"] for run in told["runs"]] == [512, 128]
    assert told["runs"][0] == json.loads(report.to_json(reports[0]))


def test_one_bad_run_spoils_the_lot() -> None:
    good, bad = made(client(completed=10)), made(client(completed=9, failed=1))
    assert runs_exit_code([good, good]) == 0
    assert runs_exit_code([good, bad, good]) == 1
