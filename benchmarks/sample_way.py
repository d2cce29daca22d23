"""Measure what a small sample costs a worker between the routes, the store and the upstream's socket, in CPU time.

    python -m benchmarks.sample_way [--samples N] [--in-flight C] [--rounds R]

It runs the dispatcher, polls, executor, forwarder and HTTP client of a worker. The store and the socket below them are
stand-ins that answer in the next turn of the loop, and bodies are read and written at no cost, so that the figure
depends on the code in between. One round suits an instruction counter: 2N samples minus N samples are N samples.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import socket
import sys
import time
from random import Random
from typing import TYPE_CHECKING, Any

import uvloop

from benchmarks import bodies
from shared.clock import SystemClock
from shared.core import retry
from shared.core.callers import ANONYMOUS
from shared.http.peer import Connection
from shared.http.request import Request
from shared.store.contract import Settled
from shared.wire import vllm
from shared.wire.sdk import result as proto
from shared.wire.sdk.sample import decode_sample
from tests.app_bench import AppBench
from tests.memory_store import MemoryServer
from tests.worker_bench import TARGET, session
from workers.api import results
from workers.samples.execution import Executor
from workers.upstream.client.own import OwnClient
from workers.upstream.forwarder import Forwarder

if TYPE_CHECKING:
    from collections.abc import Callable

    from shared.core.model import SampleSpec
    from workers.upstream.client.connection import UpstreamConnection
    from workers.upstream.client.port import Origin

PROMPT_TOKENS, RESULT_TOKENS = 128, 64
LARGEST_BYTES = 2**26


class Transport(asyncio.Transport):
    """A transport that answers every write with the same reply in the next turn."""

    def __init__(self, connection: UpstreamConnection, reply: bytes) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._connection, self._reply = connection, reply

    def write(self, data: object) -> None:
        self._loop.call_soon(self._answer)

    def _answer(self) -> None:
        self._connection.get_buffer(0)[: len(self._reply)] = self._reply
        self._connection.buffer_updated(len(self._reply))

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        pass


class Dialler:
    """A dialler whose connections have a socket on which nothing arrives."""

    def __init__(self, reply: bytes) -> None:
        self._reply = reply
        self.sockets = socket.socketpair()

    async def dial(
        self, origin: Origin, made: Callable[[], UpstreamConnection], key_digest: bytes = b""
    ) -> UpstreamConnection:
        connection = made()
        connection.socket = self.sockets[0]
        connection.connection_made(Transport(connection, self._reply))
        return connection


class InstantStore:
    """A store that accepts every begin and settle; the rest is the in-memory store's."""

    def __init__(self, beneath: object) -> None:
        self._beneath = beneath
        self._loop = asyncio.get_running_loop()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._beneath, name)

    async def begin(self, *_: object) -> None:
        await self._answered()

    async def settle(self, *_: object, **__: object) -> Settled:
        await self._answered()
        return Settled.WRITTEN

    def announce(self, *_: object) -> None:
        pass

    @property
    def restarted_s(self) -> float | None:
        return None

    async def _answered(self) -> None:
        answered = self._loop.create_future()
        self._loop.call_soon(answered.set_result, None)
        await answered


class Way:
    def __init__(self) -> None:
        reply = bodies.reply_body(RESULT_TOKENS)
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(reply)}\r\n\r\n"
        clock = SystemClock()
        bench = AppBench(MemoryServer(clock, Random(7)))  # type: ignore[arg-type] # nothing moves its clock
        self._session = session()
        self._spec = decode_sample(bodies.asample_body(PROMPT_TOKENS, RESULT_TOKENS)).spec
        client = OwnClient(
            Dialler(head.encode() + reply),  # type: ignore[arg-type] # all that is asked of it is `dial`
            limit=0,
            limit_per_origin=0,
            keep_alive_s=4.0,
            read_timeout_s=60.0,
            attempt_timeout_s=120.0,
            largest_reply_bytes=LARGEST_BYTES,
        )
        forwarder = Forwarder(client, None, clock)  # type: ignore[arg-type] # it asks no questions
        store: Any = InstantStore(bench.store)
        bench.use(store=store)
        self._parts = bench.parts
        self._dispatcher = dispatcher = bench.dispatcher
        dispatcher._store = dispatcher._settler._store = store
        dispatcher._executor = Executor(
            bench.pool, bench.adapters, forwarder, store, bench.counters, clock, retry.Policy(), lambda: 0.5
        )
        _bypass_the_wire(self._spec, reply)

    async def sample(self, number: int) -> None:
        """Submit a sample and poll for it, as the routes do."""
        parts, of = self._parts, self._session
        await parts.sessions.require_alive(of.session_id, ANONYMOUS)
        await self._dispatcher.submit(of, number, self._spec, TARGET, ANONYMOUS)
        parts.sessions.note(of.session_id)
        connection = Connection()
        request = Request(ANONYMOUS, b"", None, connection, {}, {}, None)  # type: ignore[arg-type] # no body is read
        record = await results._await_record(parts, request, of.key(number))
        assert record is not None
        assert len(record.payload)  # type: ignore[union-attr] # nothing wakes it but its record
        parts.unfetched.take(of.key(number))

    async def run(self, samples: int, in_flight: int) -> None:
        numbers = iter(range(samples))

        async def caller() -> None:
            for number in numbers:
                await self.sample(number)

        await asyncio.gather(*(caller() for _ in range(in_flight)))


def _bypass_the_wire(spec: SampleSpec, reply: bytes) -> None:
    """Replace the translation of bodies, which `benchmarks/micro/wire.py` measures."""
    (call,) = vllm.plan_calls(spec, TARGET.upstream_name, TARGET.context_tokens)
    decoded = vllm.decode_reply(call, spec, reply)
    assert isinstance(decoded, vllm.Decoded)
    result = vllm.combine(spec, [decoded])
    encoded = proto.encode_sample_response(result)
    vllm.plan_calls = lambda *_: (call,)  # type: ignore[assignment,misc]
    vllm.decode_reply = lambda *_: decoded  # type: ignore[assignment]
    vllm.combine = lambda *_: result  # type: ignore[assignment]
    proto.encode_sample_response = lambda *_: encoded  # type: ignore[assignment]


async def measure(samples: int, in_flight: int, rounds: int) -> float:
    """Return the microseconds per sample in the best round."""
    way = Way()
    await way.run(in_flight, in_flight)
    gc.collect()
    gc.disable()
    costs_us = []
    for _ in range(rounds):
        began_ns = time.thread_time_ns()
        await way.run(samples, in_flight)
        costs_us.append((time.thread_time_ns() - began_ns) / 1000 / samples)
        gc.collect()
    return min(costs_us)


def main() -> None:
    parser = argparse.ArgumentParser(description="What a sample costs between the routes, the store and the socket.")
    parser.add_argument("--samples", type=int, default=4_000)
    parser.add_argument("--in-flight", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    cost_us = uvloop.run(measure(asked.samples, asked.in_flight, asked.rounds))
    sys.stdout.write(f"{cost_us:.1f} us each, least of {asked.rounds} rounds of {asked.samples}\n")


if __name__ == "__main__":
    main()
