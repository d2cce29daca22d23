"""The counts of the simulator."""

from __future__ import annotations

import pytest

from gateway.simulator.stats import Stats, report, sample_id


@pytest.mark.parametrize(
    ("request_id", "sample"),
    [
        ("gwss-x:7-a1", "gwss-x:7"),
        ("gwss-x:7-a12", "gwss-x:7"),
        ("s", "s"),
        ("s-a", "s-a"),
        ("", ""),
        ("a-a1-b", "a-a1-b"),
    ],
)
def test_attempts_belong_to_one_sample(request_id: str, sample: str) -> None:
    assert sample_id(request_id) == sample


def test_counts_of_generations() -> None:
    stats = Stats()
    for source_ip in ("127.0.0.2", "127.0.0.2", "127.0.0.3"):
        stats.receive(source_ip)
    stats.start("a")
    stats.start("b")
    stats.end("a", aborted=False)
    stats.start("c")
    stats.end("b", aborted=True)
    told = report([stats.snapshot()])
    assert (told["received"], told["executions"], told["completed"], told["aborted"]) == (3, 3, 1, 1)
    assert (told["in_flight"], told["peak_in_flight"]) == (1, 2)
    assert told["by_source_ip"] == {"127.0.0.2": 2, "127.0.0.3": 1}
    assert told["by_request_id"] == {}
    assert told["concurrent_duplicates"] == 0


def test_an_execution_again_is_named_and_one_at_the_same_time_counted() -> None:
    stats = Stats()
    stats.start("a")
    stats.end("a", aborted=True)
    stats.start("a")
    assert report([stats.snapshot()])["concurrent_duplicates"] == 0
    stats.start("a")
    told = report([stats.snapshot()])
    assert told["concurrent_duplicates"] == 1
    assert told["by_request_id"] == {"a": 3}


def test_requests_without_an_id_are_nobodys_duplicates() -> None:
    stats = Stats()
    stats.start("")
    stats.start("")
    told = report([stats.snapshot()])
    assert (told["by_request_id"], told["concurrent_duplicates"]) == ({}, 0)


def test_processes_are_added_up() -> None:
    """A sample that ran once in each of two processes ran twice."""
    first, second = Stats(), Stats()
    for stats in (first, second):
        stats.receive("127.0.0.2")
        stats.start("a")
    told = report([first.snapshot(), second.snapshot()])
    assert (told["executions"], told["in_flight"]) == (2, 2)
    assert told["by_source_ip"] == {"127.0.0.2": 2}
    assert told["by_request_id"] == {"a": 2}


def test_clearing_keeps_what_runs() -> None:
    stats = Stats()
    stats.receive("127.0.0.1")
    stats.start("a")
    stats.clear()
    told = report([stats.snapshot()])
    assert (told["received"], told["executions"], told["in_flight"], told["peak_in_flight"]) == (0, 0, 1, 1)
    stats.end("a", aborted=False)
    assert report([stats.snapshot()])["in_flight"] == 0
