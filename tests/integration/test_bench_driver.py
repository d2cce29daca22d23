"""A whole run with real client processes, against the stub."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from gateway.bench.driver import drive
from gateway.bench.installation import Deployment
from gateway.bench.report.report import Report, exit_code
from gateway.bench.scenario import resolve
from gateway.bench.watch.procfs import children_named
from shared.core.errors import StartError
from tests.integration.bench_stub import MODEL, Fault, Stub, running
from tests.waiting import DEADLINE_S

if TYPE_CHECKING:
    from gateway.bench.load.messages import Progress

pytestmark = pytest.mark.slow


async def run(stub: Stub, shown: list[Progress] | None = None, **given: Any) -> Report:
    scenario = resolve(None, {"samples": 60, "client_processes": 2, "gen_seconds": 0.1, **given})
    async with running(stub) as url:
        show = (shown if shown is not None else []).append
        return (await drive(scenario, Deployment(url), MODEL, "tml-test", verify=False, show=show)).report


def clients_alive() -> list[int]:
    return children_named(os.getpid(), ("python", "python3", Path(sys.executable).resolve().name))


async def test_two_client_processes_share_the_samples_and_report_once() -> None:
    stub = Stub()
    shown: list[Progress] = []
    report = await run(stub, shown)
    assert (report.samples.completed, report.samples.lost, exit_code(report)) == (60, 0, 0)
    assert stub.sources == {"127.0.1.1", "127.0.1.2"}
    assert report.client.cpu_seconds > 0
    assert report.latency_s is not None
    assert not report.client.session_poll
    assert shown
    assert clients_alive() == []


async def test_the_poll_that_the_gateway_offers_is_reported() -> None:
    stub = Stub()
    stub.session_poll = True
    assert (await run(stub)).client.session_poll
    assert not (await run(stub, session_poll=False)).client.session_poll


async def test_failures_are_counted_by_kind_and_shown_by_example() -> None:
    stub = Stub()
    stub.faults["retrieve_future"] += [Fault(404), Fault(404), Fault(200, b'{"error":"bad","category":"user"}')]
    report = await run(stub)
    assert report.failures == {"retrieve 404": 2, "error, category user": 1}
    assert len(report.examples) == 3
    assert exit_code(report) == 1


async def test_a_gateway_without_sessions_is_one_sentence_and_leaves_no_process() -> None:
    stub = Stub()
    stub.faults["create_session"] += [Fault(401)] * 2
    with pytest.raises(StartError, match="create_session with 401"):
        await run(stub)
    assert clients_alive() == []


async def test_a_run_that_is_cancelled_leaves_no_process() -> None:
    stub = Stub()
    stub.ready.clear()
    task = asyncio.create_task(run(stub))
    await asyncio.wait_for(stub.arrived.wait(), DEADLINE_S)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert clients_alive() == []
