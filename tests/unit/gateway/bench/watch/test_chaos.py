"""Plans of `--chaos`, and how long the gateway took to serve again."""

from __future__ import annotations

import numpy as np
import pytest

from gateway.bench.command import bench
from gateway.bench.scenario import resolve
from gateway.bench.watch.chaos import Break, ChaosFault, is_beyond_limit, make_plan, recovered_after_s, shown
from shared.core.errors import ConfigError


def test_a_plan_is_in_order_of_time_and_is_shown_as_it_is_written() -> None:
    plan = make_plan("wipe-redis@12, kill-worker@5,stall-redis@0.5,kill-upstream@16,restart-redis@10", seed=0)
    assert shown(plan) == "stall-redis@0.5,kill-worker@5,restart-redis@10,wipe-redis@12,kill-upstream@16"
    assert make_plan(shown(plan), seed=1) == plan


def test_a_random_plan_is_drawn_from_the_seed_and_can_be_repeated_by_its_text() -> None:
    plans = [make_plan("random", seed) for seed in range(50)]
    assert plans == [make_plan("random", seed) for seed in range(50)]
    assert all(make_plan(shown(plan), seed=0) == plan for plan in plans)
    assert {planned.fault for plan in plans for planned in plan} == set(ChaosFault)
    assert all(1 <= len(plan) and 0 <= planned.at_s <= 8 for plan in plans for planned in plan)
    assert max(planned.at_s for planned in make_plan("random@100", seed=0)) > 8


def test_two_workers_that_die_together_with_what_redis_keeps_are_not_drawn() -> None:
    assert is_beyond_limit(make_plan("stall-redis@2,wipe-redis@3,kill-worker@5,kill-worker@6", 0))
    assert is_beyond_limit(make_plan("wipe-redis@3,kill-worker@2.5,kill-worker@3.5", 0))
    assert not is_beyond_limit(make_plan("wipe-redis@3,kill-worker@3.5", 0))
    assert not is_beyond_limit(make_plan("kill-worker@1,wipe-redis@8,kill-worker@12,kill-upstream@8", 0))
    drawn = [make_plan("random@20", seed) for seed in range(50)]
    assert not any(is_beyond_limit(plan) for plan in drawn)
    both = {ChaosFault.KILL_WORKER, ChaosFault.WIPE_REDIS}
    assert any(both <= {planned.fault for planned in plan} for plan in drawn)


@pytest.mark.parametrize(
    "text", ["kill-worker", "kill-worker@", "kill-worker@-1", "kill-redis@3", "@3", "random@x", ","]
)
def test_a_plan_that_is_none_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="--chaos"):
        make_plan(text, seed=0)


def test_the_scenario_keeps_the_plan_that_was_drawn() -> None:
    assert resolve(None, {"chaos": "random", "seed": 5}).chaos == shown(make_plan("random", 5))
    assert resolve(None, {}).chaos == ""


def test_only_what_bench_started_is_broken() -> None:
    with pytest.raises(ConfigError, match="--chaos has no meaning with --url"):
        bench.main(["--url", "http://127.0.0.1:1", "--chaos", "kill-worker@1"], standalone_mode=False)


SPANS = np.array([[1.0, 4.2], [9.0, 13.0], [10.5, 11.5], [10.5, 14.0], [12.5, 15.0]])
PROMISES = np.array([[9.5, 12.5], [10.5, 11.0], [11.0, 13.5], [12.5, 16.0]])
NONE = np.empty((0, 2))


def test_an_upstream_is_recovered_with_the_first_result_of_a_sample_submitted_since_it_broke() -> None:
    assert recovered_after_s(Break(ChaosFault.KILL_UPSTREAM, 10.0, 12.0), SPANS, PROMISES) == 2.0
    assert recovered_after_s(Break(ChaosFault.KILL_UPSTREAM, 20.0, 21.0), SPANS, PROMISES) is None


def test_redis_is_recovered_when_results_and_promises_come_again() -> None:
    assert recovered_after_s(Break(ChaosFault.STALL_REDIS, 10.0, 12.0), SPANS, PROMISES) == 1.5
    assert recovered_after_s(Break(ChaosFault.WIPE_REDIS, 10.0, 12.0), SPANS, NONE) == 1.0  # nothing was submitted
    assert recovered_after_s(Break(ChaosFault.WIPE_REDIS, 10.0, 12.0), NONE, PROMISES) is None


def test_a_killed_worker_is_recovered_when_its_slot_is_ready() -> None:
    assert recovered_after_s(Break(ChaosFault.KILL_WORKER, 10.0, 10.0, 11.75), SPANS, PROMISES) == 1.75
    assert recovered_after_s(Break(ChaosFault.KILL_WORKER, 10.0, 10.0), SPANS, PROMISES) is None
