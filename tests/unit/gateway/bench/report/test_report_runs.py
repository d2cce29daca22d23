"""One report of one run, or of several."""

from __future__ import annotations

import json

from gateway.bench.report.report import exit_code, to_json
from tests.bench_made import client, made, measured_run


def test_a_single_run_is_reported_as_it_is() -> None:
    only = made(client(completed=10))
    assert json.loads(to_json(only))["samples"]["requested"] == only.samples.requested


def test_several_runs_keep_their_order() -> None:
    reports = [measured_run(concurrency).report for concurrency in (512, 128)]
    told = json.loads(to_json(*reports))
    assert set(told) == {"runs"}
    assert [run["config"]["concurrency"] for run in told["runs"]] == [512, 128]
    assert told["runs"][0] == json.loads(to_json(reports[0]))


def test_one_bad_run_spoils_the_lot() -> None:
    good, bad = made(client(completed=10)), made(client(completed=9, failed=1))
    assert exit_code(good, good) == 0
    assert exit_code(good, bad, good) == 1
