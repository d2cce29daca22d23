"""One client process of the raw client: `python -m gateway.bench.load.process`, started by the driver (messages.py)."""

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
    # Every sample in flight takes a connection, so raise the limit of descriptors to the hard limit.
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    uvloop.run(_serve_driver())


async def _serve_driver() -> None:
    """Carry out the plan; stop early if the driver closes our standard input or dies."""
    lines = await standard_input()
    plan = messages.decode_for_client(await lines.readline())
    assert isinstance(plan, Plan)
    tally = LoadTally()
    client = SdkClient(
        parse_address(plan.url, plan.source_ip),
        plan.api_key,
        plan.workload,
        ResultVerifier(plan.workload, simulator_oracle(plan.workload) if plan.verify else None),
        tally,
        SystemClock(),
        session_poll=plan.session_poll,
        heartbeat_s=plan.heartbeat_s,
    )
    try:
        await client.open()
        _send(ClientReady(client.uses_session_poll))
        if await lines.readline():
            await _load(plan, client, tally, lines)
    except SetupFailed as error:
        _send(Trouble(str(error)))
    finally:
        client.close()


async def _load(plan: Plan, client: SdkClient, tally: LoadTally, lines: asyncio.StreamReader) -> None:
    calm_collector()
    cpu_s = time.process_time()
    run = asyncio.create_task(client.run(iter(range(plan.first, plan.samples, plan.step)), plan.concurrency))
    await until_done(run, tally, lines, plan.stuck_after_s, _show)
    _send(_report(client, tally, time.process_time() - cpu_s))


def _show(tally: LoadTally) -> None:
    # A sample that was lost and submitted again counts once.
    submitted = tally.submitted - tally.resubmitted
    _send(Progress(submitted, tally.completed, tally.failed, tally.wrong, tally.cancelled))


def _report(client: SdkClient, tally: LoadTally, cpu_seconds: float) -> ClientReport:
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
        sent_bytes=client.traffic.sent_bytes,
        received_bytes=client.traffic.received_bytes,
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


def _send(message: FromClient) -> None:
    sys.stdout.buffer.write(messages.encode(message))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
