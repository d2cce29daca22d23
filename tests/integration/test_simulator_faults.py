"""The simulated vLLM over real sockets as it misbehaves."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import TYPE_CHECKING

import pytest

from gateway.simulator.config import SimulatorConfig
from gateway.simulator.simulator import Simulator
from tests.integration.simulator_bench import Bench, running_bench

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    """Configured by the indirect parameter, if there is one."""
    async with running_bench(getattr(request, "param", {})) as made:
        yield made


async def test_a_status_is_answered_without_a_generation(bench: Bench) -> None:
    """D8"""
    fault = {"kind": "status", "status": 503, "body": {"error": "busy"}, "headers": {"retry-after": "7"}, "next": 1}
    bench.simulator.set_faults([fault])
    client = await bench.client()
    client.ask()
    head = await client.reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    assert b"\r\nretry-after: 7\r\n" in head
    assert await client.reader.readexactly(16) == b'{"error":"busy"}'
    assert bench.simulator.stats()["executions"] == 0
    await client.completion()


async def test_a_reset_before_the_generation_is_a_reset(bench: Bench) -> None:
    bench.simulator.set_faults([{"kind": "reset_before_read"}])
    client = await bench.client()
    client.ask()
    with pytest.raises(ConnectionResetError):
        await client.reader.read()
    assert bench.simulator.stats()["executions"] == 0


async def test_a_killed_server_ends_the_connection_without_a_byte(bench: Bench) -> None:
    bench.simulator.set_faults([{"kind": "reset_before_status"}])
    client = await bench.client()
    client.ask()
    assert await client.reader.read() == b""
    stats = bench.simulator.stats()
    assert (stats["executions"], stats["aborted"]) == (1, 1)


async def test_a_reply_can_end_after_its_head(bench: Bench) -> None:
    bench.simulator.set_faults([{"kind": "reset_after_headers"}])
    client = await bench.client()
    client.ask()
    received = await client.reader.read()
    assert received.startswith(b"HTTP/1.1 200 OK\r\n") and received.endswith(b"\r\n\r\n")


async def test_a_reply_can_end_in_its_body(bench: Bench) -> None:
    bench.simulator.set_faults([{"kind": "reset_in_body"}])
    client = await bench.client()
    client.ask()
    head, _, body = (await client.reader.read()).partition(b"\r\n\r\n")
    assert b'{"id":' in body
    assert f"content-length: {len(body)}\r\n".encode() not in head


@pytest.mark.parametrize(
    ("kind", "seen"),
    [
        ("abort", b'"finish_reason":"abort"'),
        ("null_logprobs", b"null]"),
        ("nan", b"[NaN,"),
        ("html", b"<html>"),
        ("missing_choices", b'"choices":[]'),
        ("bad_token", b'"token_ids":[1099511627776,'),
        ("error_in_200", b'{"error":'),
    ],
)
async def test_spoiled_replies_have_status_200(bench: Bench, kind: str, seen: bytes) -> None:
    """D3, D4, D9, D13, D14"""
    bench.simulator.set_faults([{"kind": kind, "next": 1}])
    client = await bench.client()
    client.ask()
    status, body = await client.reply()
    assert status == 200
    assert seen in body
    assert seen not in json.dumps(await client.completion(), separators=(",", ":")).encode()


async def test_faults_are_scripted_over_http(bench: Bench) -> None:
    client = await bench.client()
    rules = {"faults": [{"kind": "status", "status": 429, "request_id_prefix": "x-"}]}
    assert await client.call("POST", "/_sim/faults", rules) == (200, {"faults": 1})
    client.ask("x-1")
    assert (await client.reply())[0] == 429
    await client.completion("y-1")
    status, told = await client.call("POST", "/_sim/faults", [{"kind": "explode"}])
    assert (status, "explode" in told["detail"]) == (400, True)
    assert await client.call("DELETE", "/_sim/faults") == (200, {"faults": 0})
    await client.completion("x-1")


async def test_a_drain_refuses_new_connections_and_answers_none_of_the_old(bench: Bench) -> None:
    """D18"""
    client = await bench.client()
    await client.completion()
    bench.simulator.set_faults([{"kind": "drain"}])
    with pytest.raises(ConnectionRefusedError):
        await bench.client()
    client.ask()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(client.reader.read(1), 0.05)


async def test_slow_accepts_delay_new_connections_and_refuse_none(bench: Bench) -> None:
    old = await bench.client()
    bench.simulator.set_faults([{"kind": "slow_accept", "delay_s": 1.0}])
    new = await bench.client()
    new.ask()
    await old.completion()
    assert bench.simulator.stats()["connections"] == 1
    assert (await new.reply())[0] == 200


async def test_a_failure_of_the_simulator_itself_is_a_500(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception that nobody expected must not leave the client waiting."""
    monkeypatch.setattr("gateway.simulator.completion.generate", None)
    client = await bench.client()
    client.ask()
    assert (await client.reply())[0] == 500
    assert "the simulator failed at POST /v1/completions" in caplog.text


async def test_stopping_leaves_no_connection_and_no_task_behind() -> None:
    tasks = asyncio.all_tasks()
    simulator = Simulator(SimulatorConfig())
    await simulator.start()
    bench = Bench(simulator)
    client = await bench.client()
    client.ask()
    simulator.set_faults([{"kind": "hang"}])
    await bench.until("a generation", lambda stats: stats["in_flight"] == 1)
    simulator.set_faults([{"kind": "slow_accept", "delay_s": 1000.0}])
    await simulator.stop()
    assert simulator.stats()["in_flight"] == 0
    assert asyncio.all_tasks() == tasks
    with pytest.raises(ConnectionRefusedError):
        await bench.client()
    await bench.close()


async def test_a_port_in_use_is_refused(bench: Bench) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError, match="in use"):
            await Simulator(SimulatorConfig(port=taken.getsockname()[1])).start()
