"""The arithmetic of the report, and when a run counts as failed."""

from __future__ import annotations

import json

import numpy as np
import pytest

from gateway.bench.report import report
from gateway.bench.report.outcome import duplicates
from gateway.bench.report.report import SimulatorReport, Wire, Wires, exit_code, verdicts
from gateway.bench.report.table import rows, verdict_line
from gateway.bench.watch.procfs import ProcessUsage
from gateway.bench.watch.watch import Observations
from tests.bench_made import client, made, stats


def test_a_clean_run_is_zero() -> None:
    seen = Observations(first_stats=stats(2), last_stats=stats(12))
    clean = made(client(completed=10), seen=seen)
    assert verdicts(clean) == []
    assert exit_code(clean) == 0
    assert verdict_line(clean) == "OK: nothing lost, nothing wrong, nothing executed twice"


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ({"completed": 9}, "1 samples neither completed nor failed"),
        ({"completed": 9, "failed": 1}, "1 samples failed"),
        ({"completed": 9, "failed": 1, "wrong": 1}, "1 samples got something that is not their result"),
        ({"completed": 11}, "-1 samples neither completed nor failed"),
    ],
)
def test_lost_failed_and_wrong_samples_are_one(counts: dict[str, int], words: str) -> None:
    bad = made(client(**counts))
    assert verdicts(bad) == [words]
    assert exit_code(bad) == 1
    assert words in verdict_line(bad)


def test_cancelled_samples_are_not_lost() -> None:
    assert exit_code(made(client(completed=7, cancelled=3))) == 0


def test_one_execution_too_many_is_one() -> None:
    counts = client(completed=10, resubmitted=2)
    assert exit_code(made(counts, seen=Observations(first_stats=stats(0), last_stats=stats(12)))) == 0
    assert exit_code(made(counts, seen=Observations(first_stats=stats(0), last_stats=stats(13)))) == 1


def test_the_gateways_own_reexecutions_are_allowed_for() -> None:
    seen = Observations(
        first_status={"samples": {"reexecutions": 5}},
        last_status={"samples": {"reexecutions": 8}},
        first_stats=stats(0),
        last_stats=stats(13),
    )
    run = made(client(completed=10), seen=seen)
    assert run.gateway.reexecutions == 3
    assert exit_code(run) == 0


def test_an_attempt_that_reached_the_upstream_twice_is_one() -> None:
    seen = Observations(first_stats=stats(0), last_stats=stats(10, by_request_id={"a-a0": 2, "b-a0": 1}))
    assert exit_code(made(client(completed=10), seen=seen)) == 1
    assert duplicates({"a": 3, "b": 1}) == 2
    assert duplicates(4) == 4
    assert duplicates(None) == 0


def test_clients_are_added_up() -> None:
    parts = [np.array([1, 2], "<f4").tobytes(), np.array([3], "<f4").tobytes()]
    run = made(
        client(completed=2, failed=1, failures={"a": 1}, latency_s=parts[0], cpu_seconds=0.5, heartbeat_max_s=0.2),
        client(completed=1, failed=6, failures={"a": 2, "b": 4}, latency_s=parts[1], cpu_seconds=1.0),
    )
    assert (run.samples.completed, run.samples.failed, run.samples.lost) == (3, 7, 0)
    assert list(run.failures.items()) == [("b", 4), ("a", 3)]
    assert run.latency_s is not None
    assert (run.latency_s.p50, run.latency_s.max) == (2.0, 3.0)
    assert run.samples_per_second == 1.5
    assert run.client.cpu_ms_per_sample == 500.0
    assert run.client.heartbeat_max_s == 0.2


def test_each_wire_is_counted_at_its_other_end_and_told_from_ours() -> None:
    seen = Observations(
        first_stats=stats(0, received_bytes=5, sent_bytes=7),
        last_stats=stats(10, received_bytes=25, sent_bytes=47),
        first_status={"redis": {"received_bytes": 1, "sent_bytes": 2}},
    )
    seen.take_counters({"redis": {"received_bytes": 4, "sent_bytes": 8}})
    run = made(client(completed=10, sent_bytes=30, received_bytes=50), client(sent_bytes=3), seen=seen)
    assert run.wires == Wires(
        client=Wire(received_bytes=33, sent_bytes=50),
        upstream=Wire(received_bytes=40, sent_bytes=20),
        redis=Wire(received_bytes=6, sent_bytes=3),
    )
    assert dict(rows(run))["per sample"].startswith("clients 0.0 kB in")


def test_a_wire_whose_other_end_began_anew_has_no_figures() -> None:
    seen = Observations(
        first_stats=stats(0, received_bytes=5, sent_bytes=7),
        last_stats=stats(10, received_bytes=25, sent_bytes=47),
        ended_stats=[stats(3)],
        first_status={"redis": {"received_bytes": 10, "sent_bytes": 10}},
        last_status={"redis": {"received_bytes": 4, "sent_bytes": 80}},
    )
    run = made(client(completed=10), seen=seen)
    assert (run.wires.upstream, run.wires.redis) == (None, None)


def test_nothing_measured_is_null_and_not_zero() -> None:
    run = made(client(completed=10))
    told = json.loads(report.to_json(run))
    assert told["gateway"]["cpu_seconds"] is None
    assert told["gateway"]["cpu_ms_per_sample"] is None
    assert told["latency_s"] is None
    assert told["simulator"] is None
    assert told["redis"] == {"cpu_seconds": None, "peak_bytes": None, "commands_per_sample": None, "description": None}


def test_the_json_has_every_name_of_the_interface() -> None:
    seen = Observations(first_stats=stats(0), last_stats=stats(10), healthz_ms=[1.0])
    seen.workers.look({1: ProcessUsage(1.0, 10, 3)})
    told = json.loads(report.to_json(made(client(completed=10), seen=seen)))
    assert set(told) >= {
        *("samples", "failures", "seconds", "samples_per_second", "submit_latency_s", "latency_s", "gateway"),
        *("redis", "simulator", "wires", "chaos", "machine", "versions", "config"),
    }
    assert set(told["samples"]) >= {"requested", "completed", "failed", "wrong", "resubmitted"}
    assert set(told["gateway"]) >= {
        *("cpu_seconds", "cpu_ms_per_sample", "peak_rss_bytes", "peak_rss_bytes_per_worker", "peak_fds"),
        *("healthz_ms", "loop_lag_ms"),
    }
    assert set(told["gateway"]["healthz_ms"]) == {"p50", "p99", "max"}
    assert set(told["redis"]) >= {"cpu_seconds", "peak_bytes", "commands_per_sample"}
    assert set(told["simulator"]) >= {"executions", "peak_in_flight", "aborted", "duplicate_request_ids"}
    assert set(told["machine"]) == {"cpus", "memory_bytes", "kernel", "python"}


def test_the_table_leaves_out_what_was_not_measured() -> None:
    bare = dict(rows(made(client(completed=10))))
    assert "workers" not in bare
    assert "source IPs" not in bare
    seen = Observations(first_stats=stats(0), last_stats=stats(10, by_source_ip={"127.0.2.1": 6, "127.0.2.2": 4}))
    seen.workers.look({1: ProcessUsage(1.0, 50 * 1024 * 1024, 3)})
    seen.workers.look({1: ProcessUsage(1.5, 60 * 1024 * 1024, 3)})
    full = dict(rows(made(client(completed=10), seen=seen)))
    assert full["workers"] == "1 process, 0.50 s CPU, 50.00 ms per sample"
    assert full["memory"] == "workers 60 MiB, largest worker 60 MiB at most"
    assert full["source IPs"] == "127.0.2.1 (6), 127.0.2.2 (4)"


def test_where_results_were_kept_is_told_for_a_person() -> None:
    status = {"redis": {"url": "redis://r:6379", "version": "Valkey 9", "mode": "cluster"}}
    assert (
        made(client(), seen=Observations(last_status=status)).redis.description == "redis://r:6379, Valkey 9, cluster"
    )
    status["redis"]["mode"] = "standalone"
    assert made(client(), seen=Observations(last_status=status)).redis.description == "redis://r:6379, Valkey 9"


def test_quantiles_of_nothing_are_nothing() -> None:
    assert report.quantiles(np.array([], np.float32)) is None
    assert report.tail([]) is None
    assert report.per(1.0, 0) is None
    assert report.per(None, 3) is None
    assert report.rate(5, 0.0) > 0


def test_a_simulator_keeps_its_source_addresses_of_this_run_only() -> None:
    seen = Observations(
        first_stats=stats(0, by_source_ip={"127.0.2.1": 3, "127.0.0.1": 2}),
        last_stats=stats(10, by_source_ip={"127.0.2.1": 13, "127.0.0.1": 2}),
    )
    simulator = made(client(completed=10), seen=seen).simulator
    assert isinstance(simulator, SimulatorReport)
    assert simulator.by_source_ip == {"127.0.2.1": 10}
