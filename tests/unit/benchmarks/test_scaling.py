"""The arithmetic from one sample's costs to a million in flight."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks import scaling
from benchmarks.scaling import MIB, Costs, Limit, Site

if TYPE_CHECKING:
    from pathlib import Path

COSTS = Costs(
    worker_cpu_s=0.5e-3,
    redis_cpu_s=40e-6,
    redis_commands=4.0,
    client_bytes=2_000,
    upstream_bytes=6_000,
    redis_bytes=1_000,
    memory_bytes=20_000,
    kept_bytes=1_000,
    connections=2.0,
)
SITE = Site(workers=16, utilisation=0.8, link_bytes_s=1e9, in_flight_limit=50_000, ports=20_000, open_files=100_000)


def report() -> dict[str, Any]:
    wire = {"received_bytes": 4_000, "sent_bytes": 9_000}
    return {
        "samples": {"completed": 1_000},
        "config": {"concurrency": 100},
        "gateway": {"cpu_seconds": 0.5, "workers": 2, "peak_rss_bytes": 138 * MIB, "peak_fds": 230},
        "redis": {"cpu_seconds": 0.04, "commands_per_sample": 4.1, "peak_bytes": 2_000_000},
        "wires": {"client": wire, "upstream": wire, "redis": wire},
    }


def test_costs_are_per_sample_and_memory_per_sample_in_flight() -> None:
    costs = scaling.costs_of(report(), base_bytes=64 * MIB)
    assert costs.worker_cpu_s == pytest.approx(0.5e-3)
    assert costs.redis_cpu_s == pytest.approx(40e-6)
    assert costs.client_bytes == 9
    assert costs.memory_bytes == pytest.approx(10 * MIB / 100)
    assert costs.kept_bytes == 2_000
    assert costs.connections == 2.3


def test_a_worker_below_its_base_costs_no_memory() -> None:
    assert scaling.costs_of(report(), base_bytes=100 * MIB).memory_bytes == 0


@pytest.mark.parametrize(
    ("section", "name"), [("gateway", "cpu_seconds"), ("redis", "cpu_seconds"), ("wires", "redis")]
)
def test_a_report_without_a_figure_is_refused_by_its_name(section: str, name: str) -> None:
    bare = report()
    bare[section][name] = None
    with pytest.raises(ValueError, match=rf"{section}\.{name}"):
        scaling.costs_of(bare)


def test_one_redis_is_full_before_sixteen_workers() -> None:
    first, second = scaling.rate_limits(COSTS, SITE)[:2]
    assert (first.resource, first.samples) == ("CPU of Redis", pytest.approx(20_000))
    assert (second.resource, second.samples) == ("CPU of the workers", pytest.approx(25_600))


def test_a_cluster_costs_more_for_each_sample_and_has_more_cores() -> None:
    cluster = replace(SITE, shards=6, cluster_factor=2.0)
    found = {limit.resource: limit.samples for limit in scaling.rate_limits(COSTS, cluster)}
    assert found["CPU of Redis"] == pytest.approx(6 * 0.8 / 80e-6)
    assert min(found, key=lambda resource: found[resource]) == "CPU of the workers"


def test_large_results_fill_the_network_first() -> None:
    large = replace(COSTS, upstream_bytes=20e6)
    tightest = scaling.rate_limits(large, SITE)[0]
    assert (tightest.resource, tightest.samples) == ("network to the upstreams", pytest.approx(40))


def test_what_bounds_the_samples_in_flight() -> None:
    found = {limit.resource: limit.samples for limit in scaling.in_flight_limits(COSTS, SITE)}
    assert found == {
        "--max-in-flight": 800_000,
        "memory of the workers": pytest.approx(16 * (4 * 1024 * MIB * 0.8 - 64 * MIB) / 20_000),
        "open files of the workers": 16 * 100_000 * 0.8 / 2,
        "ports of the source IPs": 320_000,
    }
    assert scaling.in_flight_limits(COSTS, SITE)[0].resource == "ports of the source IPs"


def test_a_second_upstream_address_doubles_the_ports() -> None:
    found = scaling.in_flight_limits(COSTS, replace(SITE, upstream_addresses=2))
    assert Limit("ports of the source IPs", 640_000) in found


def test_a_million_in_flight() -> None:
    need = scaling.needs(COSTS, SITE, 1_000_000, 100.0, kept_s=330.0)
    assert need.rate == 10_000
    assert (need.workers, need.workers_because) == (50, "ports of the source IPs")
    assert need.source_ips_per_upstream == 50
    assert need.shards == 1
    assert need.redis_memory_bytes == pytest.approx(10_000 * 330 * 1_000)
    assert need.memory_bytes == pytest.approx(50 * SITE.base_bytes + 1_000_000 * 20_000)
    assert need.upstream_bytes_s == pytest.approx(60e6)


def test_short_samples_take_workers_for_their_cpu() -> None:
    need = scaling.needs(COSTS, SITE, 131_072, 2.0, kept_s=330.0)
    assert (need.workers, need.workers_because) == (41, "CPU of the workers")
    assert need.shards == scaling.shards_for(COSTS, SITE, need.rate) == 7


@pytest.mark.parametrize(("rate", "shards"), [(1, 1), (20_000, 1), (20_001, 3), (59_000, 6)])
def test_a_cluster_has_three_masters_at_least(rate: float, shards: int) -> None:
    assert scaling.shards_for(COSTS, SITE, rate) == shards


def test_the_script_prints_its_assumptions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report()))
    assert scaling.main([str(path), "--workers", "16", "--shards", "1", "3"]) == 0
    told = capsys.readouterr().out
    assert "0.500 ms" in told
    assert "3 masters" in told
    assert "Assumed: --workers 16, --shards 1 3," in told


def test_a_file_that_is_no_report_is_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    path.write_text("{}")
    assert scaling.main([str(path)]) == 2
    assert "has no samples.completed" in capsys.readouterr().err
