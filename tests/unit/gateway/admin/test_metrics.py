"""The metrics for Prometheus, and that docs/operations.md lists the same."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.admin import metrics
from gateway.admin.timings import Timings
from shared.counters import NAMES
from tests.gateway_views import VIEW, histogram

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from gateway.admin.view import View

OPERATIONS: Final = (Path(__file__).parents[4] / "docs" / "operations.md").read_text(encoding="utf-8")
ROW: Final = re.compile(r"^\| `(gateway_\w+)` \| (\w+) \| ?(.*?) \| (.*) \|$", re.MULTILINE)


def families(view: View) -> list[Metric]:
    return list(text_string_to_metric_families(metrics.exposition(view).decode()))


def samples(view: View) -> dict[tuple[str, str], float]:
    return {
        (sample.name, ",".join(sample.labels.values())): sample.value
        for family in families(view)
        for sample in family.samples
    }


def test_every_counter_appears_once() -> None:
    names = [metrics._metric_of(name) for name in VIEW.totals]
    assert len(set(names)) == len(VIEW.totals)
    found = samples(VIEW)
    for metric, label, word in names:
        assert (f"gateway_{metric}_total", word if label else "") in found
    assert found["gateway_samples_settled_total", "completed"] == 5
    assert found["gateway_upstream_faults_total", "interrupted"] == 2
    assert found["gateway_samples_begun_total", ""] == 9
    assert found["gateway_worker_cpu_seconds_total", ""] == 2.5


def test_gauges() -> None:
    found = samples(VIEW)
    assert found["gateway_worker_up", "1"] == 1
    assert found["gateway_samples_in_flight", "0"] == 3
    assert found["gateway_upstream_up", "http://u1"] == 0
    assert found["gateway_upstream_logprobs_raw", "http://u0"] == 1
    assert found["gateway_redis_used_bytes", ""] == 10
    assert found["gateway_undelivered_bytes", ""] == 200


def test_histograms_are_cumulative_and_end_with_all() -> None:
    found = samples(VIEW)
    assert found["gateway_upstream_seconds_count", "http://u0"] == 4
    assert found["gateway_upstream_seconds_sum", "http://u0"] == 12.0
    assert found["gateway_upstream_seconds_bucket", "2.048,http://u0"] == 2
    assert found["gateway_upstream_seconds_bucket", "+Inf,http://u0"] == 4
    assert found["gateway_stage_seconds_count", "upstream"] == 8
    assert found["gateway_stage_seconds_count", "delivery"] == 0


def test_bounds_of_histograms_double() -> None:
    """Four times as many series would not tell an alert more; what is between two bounds counts in the upper one."""
    stages = {**VIEW.since_start.stages, "upstream": histogram(0.9, 1.0, 1.0, 1.1, 86_400.0)}
    found = samples(replace(VIEW, since_start=Timings(stages=stages)))
    buckets = {
        label.removesuffix(",upstream"): value
        for (name, label), value in found.items()
        if name == "gateway_stage_seconds_bucket" and label.endswith(",upstream")
    }
    *bounds, last = buckets
    assert last == "+Inf"
    assert [float(bound) for bound in bounds] == [0.0005 * 2**i for i in range(23)]
    assert [buckets[bound] for bound in ("0.512", "1.024", "2.048", bounds[-1], last)] == [0, 3, 4, 4, 5]


def test_by_upstream() -> None:
    found = samples(VIEW)
    assert found["gateway_upstream_failures_total", "http://u1"] == 2
    assert found["gateway_upstream_wasted_seconds_total", "http://u1"] == 3.0


def test_by_key_and_no_further_than_the_file_of_keys() -> None:
    found = samples(VIEW)
    assert found["gateway_key_samples_begun_total", "alice"] == 7
    assert found["gateway_key_samples_rejected_total", "alice"] == 2
    assert found["gateway_key_samples_in_flight", "alice"] == 3
    assert found["gateway_key_samples_begun_total", "bob"] == 0
    without = samples(replace(VIEW, keys=()))
    assert not [name for name, _ in without if name.startswith("gateway_key_")]


def test_without_redis() -> None:
    found = samples(replace(VIEW, redis=None))
    assert found["gateway_redis_up", ""] == 0
    assert ("gateway_redis_used_bytes", "") not in found


def test_the_table_and_the_exposition_agree() -> None:
    documented = {name: (kind, re.findall(r"`(\w+)`", labels)) for name, kind, labels, _ in ROW.findall(OPERATIONS)}
    exposed = {}
    for family in families(VIEW):
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        name = family.name + ("_total" if family.type == "counter" else "")
        exposed[name] = (family.type, sorted(labels))
    assert documented == exposed


@pytest.mark.parametrize("prefix", ["faults_", "rejected_"])
def test_words_of_labels_are_documented(prefix: str) -> None:
    metric, _ = metrics._FAMILIES[prefix]
    row = next(row for row in ROW.findall(OPERATIONS) if row[0] == f"gateway_{metric}_total")
    words = {name.removeprefix(prefix) for name in NAMES if name.startswith(prefix)}
    assert words
    assert words == set(re.findall(r"`(\w+)`", row[3]))
