"""One client process: `python -m gateway.bench.load.process`, started and spoken to by the driver."""

from __future__ import annotations

import asyncio
import resource
import sys
import time
from typing import TYPE_CHECKING

import uvloop

from gateway.bench.load import messages
from gateway.bench.load.client import SdkClient, SetupFailed
from gateway.bench.load.expected import simulator_oracle
from gateway.bench.load.frame import standard_input, until_done
from gateway.bench.load.messages import ClientReady, ClientReport, Plan, Progress, Trouble
from gateway.bench.load.tally import LoadTally
from gateway.bench.load.transport import parse_address
from gateway.bench.load.verification import ResultVerifier
from gateway.machine.collector import calm_collector
from shared.clock import SystemClock

if TYPE_CHECKING:
    from gateway.bench.load.messages import FromClient


def main() -> None:
    _allow_descriptors()
    uvloop.run(_serve_driver())


def _allow_descriptors() -> None:
    """A connection per sample in flight: as many as the machine lets us have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _serve_driver() -> None:
    """Does the plan; stops early when the driver closes our standard input, or is gone."""
    lines = await standard_input()
    plan = messages.decode_for_client(await lines.readline())
    assert isinstance(plan, Plan)
    try:
        await _work(plan, lines)
    except SetupFailed as error:
        _say(Trouble(str(error)))


async def _work(plan: Plan, lines: asyncio.StreamReader) -> None:
    tally = LoadTally()
    client = _client(plan, tally)
    try:
        await client.open()
        _say(ClientReady(client.uses_session_poll))
        if await lines.readline():
            await _load(plan, client, tally, lines)
    finally:
        client.close()


async def _load(plan: Plan, client: SdkClient, tally: LoadTally, lines: asyncio.StreamReader) -> None:
    calm_collector()
    cpu_s = time.process_time()
    run = asyncio.create_task(client.run(iter(range(plan.first, plan.samples, plan.step)), plan.concurrency))
    await until_done(run, tally, lines, plan.stuck_after_s, _show)
    _say(_report(client, tally, time.process_time() - cpu_s))


def _client(plan: Plan, tally: LoadTally) -> SdkClient:
    return SdkClient(
        parse_address(plan.url, plan.source_ip),
        plan.api_key,
        plan.workload,
        ResultVerifier(plan.workload, simulator_oracle(plan.workload) if plan.verify else None),
        tally,
        SystemClock(),
        session_poll=plan.session_poll,
        heartbeat_s=plan.heartbeat_s,
    )


def _show(tally: LoadTally) -> None:
    # What was lost and is submitted again is one sample all the same.
    submitted = tally.submitted - tally.resubmitted
    _say(Progress(submitted, tally.completed, tally.failed, tally.wrong, tally.cancelled))


def _report(client: SdkClient, tally: LoadTally, cpu_seconds: float) -> ClientReport:
    traffic = client.traffic
    return ClientReport(
        completed=tally.completed,
        failed=tally.failed,
        wrong=tally.wrong,
        cancelled=tally.cancelled,
        resubmitted=tally.resubmitted,
        duplicates=tally.duplicates,
        abandoned_polls=tally.abandoned_polls,
        polls=tally.polls,
        session_polls=tally.session_polls,
        paused=tally.paused,
        requests=client.requests_sent,
        connections=client.connections_opened,
        sent_bytes=traffic.sent_bytes,
        received_bytes=traffic.received_bytes,
        heartbeats=tally.heartbeats,
        heartbeats_failed=tally.heartbeats_failed,
        heartbeat_max_s=tally.heartbeat_max_s,
        failures=dict(tally.failures),
        examples=tally.examples,
        submit_s=tally.submit_s.tobytes(),
        latency_s=tally.latency_s.tobytes(),
        spans_s=tally.spans_s.tobytes(),
        promises_s=tally.promises_s.tobytes(),
        cpu_seconds=cpu_seconds,
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def _say(message: FromClient) -> None:
    sys.stdout.buffer.write(messages.encode(message))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
