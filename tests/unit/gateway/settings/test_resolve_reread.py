from __future__ import annotations

import pytest

from gateway.settings.resolve import FIXED_AT_START, for_running_gateway, need_a_restart, roll_deadline_s
from gateway.settings.table import FLAGS
from shared.config import Settings


def test_what_is_bound_or_counted_stays_and_the_rest_is_taken() -> None:
    running = Settings(port=1000, workers=2, max_in_flight=5)
    merged = for_running_gateway(Settings(port=2000, workers=3, max_in_flight=6, warm_spare=False), running)
    assert (merged.port, merged.workers) == (1000, 2)
    assert (merged.max_in_flight, merged.warm_spare) == (6, False)


def test_a_roll_waits_for_the_longest_sample_and_all_it_may_be_executed_again() -> None:
    assert roll_deadline_s(Settings(upstream_wait_s=10, attempt_timeout_s=100, max_reexecutions=2)) == 310


def test_what_is_passed_over_is_named() -> None:
    running = Settings(port=1000, admin_key="a", max_in_flight=5)
    assert need_a_restart(Settings(port=1000, admin_key="a", max_in_flight=6), running) == []
    changed = Settings(port=2000, admin_key="b", redis_memory_bytes=1, max_in_flight=6)
    assert need_a_restart(changed, running) == ["--port", "--redis-memory", "--admin-key-file"]


@pytest.mark.parametrize("name", FIXED_AT_START.values())
def test_what_is_named_is_a_flag(name: str) -> None:
    assert name in {flag.name for flag in FLAGS}
