"""Samples of an adapter: they wait until it is placed, and are placed again where it was lost."""

from __future__ import annotations

import json
import logging

import pytest

from shared.core.faults import Fault, FaultClass
from shared.core.lifecycle import State
from shared.core.model import Category
from tests.execution_bench import ADAPTER, BUSY, MISSING, Bench, faults_of
from workers.upstream.catalogue import Target

ADAPTED = Target(ADAPTER.name, "sim/tiny", 4096, ADAPTER)


async def test_a_sample_waits_until_its_adapter_is_placed_and_says_so() -> None:
    bench = Bench()
    bench.adapters.faults = [MISSING, BUSY, None]
    state, _ = await bench.execute(target=ADAPTED)
    assert state is State.READY
    assert bench.paused == [MISSING.message, BUSY.message]
    assert bench.marks == [True, False] * 5
    assert [asked["model"] for asked in bench.forwarder.asked] == ["r--c"]
    assert bench.counters.reexecutions == 0


async def test_an_adapter_that_never_comes_fails_the_sample_in_its_own_time() -> None:
    bench = Bench()
    bench.adapters.faults = [MISSING] * 500
    state, payload = await bench.execute(target=ADAPTED)
    assert state is State.FAILED
    assert sum(bench.slept_s) == pytest.approx(60.0)
    assert json.loads(payload) == {
        "error": "no upstream took it for 60 s; adapter tinker://r/c: no files",
        "category": "user",
    }
    assert bench.forwarder.asked == []


async def test_waiting_for_an_adapter_is_no_failed_attempt(caplog: pytest.LogCaptureFixture) -> None:
    """No upstream was asked for the sample, so none has failed; once one is asked, what it says counts."""
    caplog.set_level(logging.DEBUG, "workers.samples.execution")
    bench = Bench(BUSY)
    bench.adapters.faults = [MISSING, MISSING, None]
    assert (await bench.execute(target=ADAPTED))[0] is State.READY
    assert faults_of(bench) == {"never_executed": 1}
    assert bench.counters.attempts == 2
    assert [record.message for record in caplog.records] == ["nobody was asked"] * 2 + ["attempt failed"]


async def test_an_upstream_that_lost_an_adapter_is_no_end_for_the_sample() -> None:
    """It was restarted: the adapter is placed again."""
    refused = Fault(FaultClass.REFUSED, "upstream answered 404: no such model", Category.USER, model_missing=True)
    bench = Bench(refused)
    assert (await bench.execute(target=ADAPTED))[0] is State.READY
    assert bench.adapters.lost_at == ["http://a"]
    bench = Bench(refused)
    assert (await bench.execute())[0] is State.FAILED
    assert bench.adapters.lost_at == []
