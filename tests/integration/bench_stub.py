"""A stub that speaks just enough of the Tinker API to try the load client against, with scripted misbehaviour.

It is no gateway: one process, results at once (or when a test says so), nothing expires. A sample's tokens are a
digest of its prompt and seed; `StubVerifier` knows what they must be.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict, deque
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from aiohttp import web

from gateway.bench.load.replies import SampleFailure
from shared.core.result import SampleResult, SequenceResult, StopReason
from shared.wire.sdk.result import encode_sample_response

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from gateway.bench.load.workload import Sample

MODEL = "stub-model"


@dataclass(frozen=True)
class Fault:
    """Instead of an answer: a status (0: the connection is cut), after the request took effect or before."""

    status: int
    body: bytes = b'{"detail":"scripted"}'
    after: bool = False


def result_of(tokens: list[int], seed: int) -> bytes:
    """A well-formed SampleResponse of 8 made-up tokens."""
    digest = blake2b(json.dumps([tokens, seed]).encode(), digest_size=32).digest()
    return encode_sample_response(SampleResult((SequenceResult(digest, bytes(32), StopReason.LENGTH),)))


class StubVerifier:
    def complaint(self, payload: bytes, wanted: Sample) -> SampleFailure | None:
        ok = payload == result_of(wanted.prompt.tolist(), wanted.seed)
        return None if ok else SampleFailure("wrong tokens", "not the digest of this prompt", wrong=True)


class Stub:
    """`faults[path]` are used up first. `ready`: cleared, polls are held until it is set. `hold_s`: for how long."""

    def __init__(self) -> None:
        self.faults: defaultdict[str, deque[Fault]] = defaultdict(deque)
        self.ready = asyncio.Event()
        self.ready.set()
        self.hold_s = 0.2
        self.session_poll = False
        self.requests: Counter[str] = Counter()
        self.submissions: Counter[int] = Counter()
        self.sources: set[str] = set()
        self.open_asamples = self.peak_asamples = 0
        self.results: dict[str, bytes] = {}
        self.order: list[str] = []
        self.acknowledged: list[str] = []
        self.ack_timeouts: list[float | None] = []
        self.cancelled: list[str] = []
        self.arrived = asyncio.Event()
        self._then: dict[str, tuple[int, Callable[[], None]]] = {}

    def on(self, name: str, count: int, then: Callable[[], None]) -> None:
        """Calls `then` when the `count`-th request to this path arrives."""
        self._then[name] = (count, then)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**26)
        for name, handler in (
            ("client/config", self._config),
            ("create_session", self._create_session),
            ("create_sampling_session", self._create_sampling_session),
            ("session_heartbeat", self._nothing),
            ("asample", self._asample),
            ("retrieve_future", self._retrieve),
            ("retrieve_futures", self._session_poll),
            ("cancel_future", self._cancel),
        ):
            app.router.add_post(f"/api/v1/{name}", self._faulty(name, handler))
        return app

    def _faulty(
        self, name: str, handler: Callable[[dict[str, Any]], Awaitable[web.Response]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            self.requests[name] += 1
            count, then = self._then.get(name, (0, None))
            if then is not None and count == self.requests[name]:
                then()
            if request.transport is not None:
                self.sources.add(request.transport.get_extra_info("peername")[0])
            body = json.loads(await request.read())
            fault = self.faults[name].popleft() if self.faults[name] else None
            if fault is None or fault.after:
                response = await handler(body)
            if fault is None:
                return response
            if fault.status:
                return web.Response(status=fault.status, body=fault.body, content_type="application/json")
            assert request.transport is not None
            request.transport.abort()
            return web.Response()

        return handle

    async def _config(self, body: dict[str, Any]) -> web.Response:
        return web.json_response({"sample_use_retrieve_futures": self.session_poll})

    async def _create_session(self, body: dict[str, Any]) -> web.Response:
        return web.json_response({"session_id": "s-1"})

    async def _create_sampling_session(self, body: dict[str, Any]) -> web.Response:
        return web.json_response({"sampling_session_id": f"{body['session_id']}:sample:0"})

    async def _nothing(self, body: dict[str, Any]) -> web.Response:
        return web.json_response({})

    async def _asample(self, body: dict[str, Any]) -> web.Response:
        self.open_asamples += 1
        self.peak_asamples = max(self.peak_asamples, self.open_asamples)
        await asyncio.sleep(0)
        self.open_asamples -= 1
        seq_id = body["seq_id"]
        self.submissions[seq_id] += 1
        request_id = f"{body['sampling_session_id']}:{seq_id}"
        if request_id not in self.results:
            tokens = body["prompt"]["chunks"][0]["tokens"]
            self.results[request_id] = result_of(tokens, body["sampling_params"]["seed"])
            self.order.append(request_id)
            self.arrived.set()
        ids = [f"{request_id}:{index}" for index in range(body["num_samples"])]
        return web.json_response({"request_id": request_id, "sample_sequence_ids": ids})

    async def _retrieve(self, body: dict[str, Any]) -> web.Response:
        if not await self._held(self.ready):
            return web.json_response({"type": "try_again", "request_id": body["request_id"]}, status=408)
        return web.Response(body=self.results[body["request_id"]], content_type="application/x-protobuf")

    async def _session_poll(self, body: dict[str, Any]) -> web.Response:
        self.acknowledged += body["retrieved_request_ids"]
        self.ack_timeouts.append(body.get("timeout"))
        cursor = body["prev_cursor"]
        if len(self.order) <= cursor and "timeout" not in body:
            self.arrived.clear()
            await self._held(self.arrived)
        if not self.ready.is_set() and ("timeout" in body or not await self._held(self.ready)):
            return web.json_response({"completions": [], "cursor": cursor})
        news = [
            {"state": "finished", "request_id": request_id, "response_payload_uncompressed_size": 64}
            for request_id in self.order[cursor:]
        ]
        return web.json_response({"completions": news, "cursor": len(self.order)})

    async def _cancel(self, body: dict[str, Any]) -> web.Response:
        self.cancelled.append(body["request_id"])
        return web.json_response({})

    async def _held(self, event: asyncio.Event) -> bool:
        try:
            await asyncio.wait_for(event.wait(), self.hold_s)
        except TimeoutError:
            return False
        return True


@asynccontextmanager
async def running(stub: Stub) -> AsyncIterator[str]:
    """The stub's base URL, on a free port."""
    runner = web.AppRunner(stub.app())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()
