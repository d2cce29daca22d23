"""A whole public application in process: real routes, sessions, waiters and dispatcher on an in-memory store."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import replace
from hashlib import sha256
from random import Random
from typing import TYPE_CHECKING, Any, Final

from shared.core import ids
from shared.core.callers import ApiKey, Keyring
from shared.core.lifecycle import State
from shared.http.peer import Connection
from shared.loop.turns import TurnLimit
from shared.wire.sdk import result
from tests.exchanges import PER_TURN, Answered, FakeCarrier, request_bytes, service_of
from tests.waiting import until
from tests.worker_bench import OWNER, WorkerBench, openai_of, session
from workers.api.app import PublicApp
from workers.duties.duties import Housekeeping
from workers.parts import Live, WorkerParts
from workers.samples.expiry import DeliveryExpiry
from workers.samples.live import Ending
from workers.samples.sessions import Sessions
from workers.upstream.adapter_loading import AdapterLoader
from workers.upstream.adapters import Adapters
from workers.upstream.catalogue import Catalogue
from workers.upstream.pool import UpstreamPool
from workers.upstream.published import PublishedUpstreams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from shared.core.faults import Fault
    from shared.core.model import SampleKey, SamplingSession
    from tests.memory_store import MemoryServer

API: Final = "/api/v1"
TINY: Final = result.encode_sample_response(result.decode_sample_response(b""))
# Nobody renews the lease here.
_NO_HOUSEKEEPING_S: Final = 1e9
KEY_A: Final = "tml-a"
KEY_B: Final = "tml-b"
KEYS: Final = tuple(ApiKey(key, sha256(key.encode()).hexdigest()) for key in (KEY_A, KEY_B))
LISTING: Final = json.dumps(
    {
        "data": [
            {"id": "sim/tiny", "max_model_len": 64},
            {"id": "run-1", "parent": "sim/tiny"},
        ]
    }
).encode()


class FakeUpstream:
    """Tells its models; a forwarder as far as a pool needs one."""

    def __init__(self) -> None:
        self.listing: bytes | Fault = LISTING
        self.listed = 0

    async def get(self, *_: object) -> bytes | Fault:
        self.listed += 1
        return self.listing


class AppBench(WorkerBench):
    """One worker that answers requests; give it another's `server` to make it a second one."""

    def __init__(self, server: MemoryServer | None = None, owner: str = OWNER, **settings: Any) -> None:
        super().__init__(server, owner, **settings)
        self.sessions = Sessions(self.store, self.clock, self.settings.session_timeout_s)
        self.upstream = FakeUpstream()
        catalogue = Catalogue((), self.settings.lora_name_template, self.settings.lora_path)
        self.pool = UpstreamPool(
            ("http://upstream",),
            self.upstream,  # type: ignore[arg-type] # all that is asked of it is `get`
            catalogue,
            self.clock,
            sleep=self.sleep,
        )
        loader = AdapterLoader(self.pool, self.upstream, self.store, self.counters, owner, 60.0, self.sleep)  # type: ignore[arg-type]
        self.adapters = Adapters(self.pool, loader, self.clock, 60.0, self.sleep)
        self.expiry = DeliveryExpiry(self.store, self.settings, self.counters, self.unfetched, self.clock)
        self.parts = WorkerParts(
            live=Live(self.settings, Keyring(self.settings.api_keys)),
            store=self.store,
            dispatcher=self.dispatcher,
            executor=self.executor,  # type: ignore[arg-type] # nothing in a handler asks for it
            waiters=self.waiters,
            sessions=self.sessions,
            pool=self.pool,
            adapters=self.adapters,
            published=PublishedUpstreams(self.store, self.pool, ("http://upstream",)),
            expiry=self.expiry,
            unfetched=self.unfetched,
            counters=self.counters,
            clock=self.clock,
            random_bytes=Random(owner).randbytes,
            openai=openai_of(self.pool, self.clock),
        )
        self.housekeeping = Housekeeping(self.parts, owner, self.settings)
        self.app = PublicApp(self.parts)
        self.edge_turns = TurnLimit(PER_TURN)

    def use(self, **parts: Any) -> None:
        """Other parts of `WorkerParts`; to be called before anything is asked."""
        self.parts = replace(self.parts, **parts)
        self.app = PublicApp(self.parts)

    async def open(self) -> AppBench:
        await self.store.open(self, self.owner)
        await self.renew_lease()
        await self.pool.learn_models()
        return self

    async def renew_lease(self) -> None:
        await self.store.renew_lease(self.owner, ttl_s=_NO_HOUSEKEEPING_S)
        self.dispatcher.meet_restart(self.store.restarted_s)

    async def sleep(self, delay_s: float) -> None:
        self.clock.advance(delay_s)

    async def close(self) -> None:
        await self.adapters.close()
        await self.dispatcher.close()
        await self.store.close()

    # -- what the store tells

    def on_announcement(self, session_key: str, seq_ids: Sequence[int]) -> None:
        self.waiters.announced(session_key, seq_ids)

    def on_gap(self) -> None:
        self.waiters.look_again()

    def on_control(self, message: bytes) -> None:
        self.housekeeping.on_control(message)

    # -- requests

    async def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        key: str | None = None,
        accept: str | None = "application/x-protobuf, application/json",
        connection: Connection | None = None,
        trace: str | None = None,
    ) -> Answered:
        headers = [(b"x-api-key", key.encode())] if key is not None else []
        headers += [(b"accept", accept.encode())] if accept is not None else []
        headers += [(b"traceparent", trace.encode())] if trace is not None else []
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        carrier = FakeCarrier(service_of(self.app.starlette, self.app.hot, self.dispatcher.quota), connection)
        carrier.service.turns = self.edge_turns
        carrier.feed(request_bytes(method, path, headers, data))
        return await carrier.answered()

    async def post(self, path: str, body: Any = None, **more: Any) -> Answered:
        return await self.request("POST", API + path, {} if body is None else body, **more)

    async def asample(
        self,
        seq_id: int = 1,
        of: SamplingSession | None = None,
        key: str | None = None,
        trace: str | None = None,
        **more: Any,
    ) -> Answered:
        document = {
            "sampling_session_id": (of or session()).sampling_session_id,
            "seq_id": seq_id,
            "num_samples": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [10, 11, 12]}]},
            "sampling_params": {"max_tokens": 4, "seed": 7},
        }
        return await self.post("/asample", document | more, key=key, trace=trace)

    async def retrieve(self, request_id: Any, key: str | None = None, **more: Any) -> Answered:
        accept = {name: more.pop(name) for name in ("accept", "connection") if name in more}
        return await self.post("/retrieve_future", {"request_id": request_id, **more}, key=key, **accept)

    async def poll_session(
        self, of: SamplingSession | None = None, cursor: int = 0, timeout_s: float | None = None, **more: Any
    ) -> Answered:
        outside = {name: more.pop(name) for name in ("key", "connection") if name in more}
        document = {
            "target": {
                "type": "sampling_session",
                "sampling_session_id": (of or session()).sampling_session_id,
                "cloned_sampler_id": 0,
            },
            "prev_cursor": cursor,
            "timeout": timeout_s,
            "retrieved_request_ids": [],
        }
        return await self.post("/retrieve_futures", document | more, **outside)

    def left_s(self, key: SampleKey) -> float:
        """How long the record of a settled sample is still kept."""
        expires_s = self.server.samples[key].expires_s
        assert expires_s is not None
        return expires_s - self.clock.monotonic_s()


@asynccontextmanager
async def opened(**settings: Any) -> AsyncIterator[AppBench]:
    bench = await AppBench(**settings).open()
    yield bench
    await bench.close()


async def settled(bench: AppBench, ending: Ending | None = None, seq_id: int = 1, **more: Any) -> str:
    """The request id of a sample that was submitted and has ended."""
    promised = await bench.asample(seq_id, **more)
    assert promised.status == 200, promised
    key = (more.get("of") or session()).key(seq_id)
    await until(lambda: key in bench.executor.started)
    bench.executor.finish(key, ending or Ending(State.READY, TINY))
    await until(lambda: key not in bench.dispatcher.samples)
    return str(promised.json["request_id"])


def request_id(seq_id: int = 1, of: SamplingSession | None = None) -> str:
    return ids.request_id(of or session(), seq_id)


def session_of(key: str, number: int = 0) -> SamplingSession:
    """A sampling session of the client with this API key."""
    secret = ids.owner_secret(key)
    return session(number, ids.new_session_id(bytes(16), secret), secret)


class LeavingConnection(Connection):
    """A client that is there when its request is read, and is gone before its reply is."""

    async def drained(self) -> bool:
        self.lose(broken=True)
        return await super().drained()


async def asleep(bench: AppBench, polls: int = 1) -> None:
    """Until so many polls wait."""
    await until(lambda: len(bench.waiters) >= polls, f"{polls} polls that wait")
    for _ in range(20):
        await asyncio.sleep(0)
