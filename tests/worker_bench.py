"""The parts of one worker, put together in process around an in-memory store: what the tests of workers/ share."""

from __future__ import annotations

import asyncio
from hashlib import blake2b
from random import Random
from typing import TYPE_CHECKING, Any, Final

from shared.clock import ManualClock
from shared.config import Settings
from shared.core import ids
from shared.core.callers import ANONYMOUS
from shared.core.errors import StoreUnavailable
from shared.core.lifecycle import State
from shared.core.model import ModelRef, SampleSpec, SamplingParams
from shared.counters import Counters
from tests.memory_store import MemoryServer, MemoryStore
from tests.waiting import until
from workers.passing.openai import OpenAiProxy
from workers.samples.dispatcher import Dispatcher
from workers.samples.expiry import UnfetchedResults
from workers.samples.live import Ending, Pace
from workers.samples.waiters import Waiters
from workers.upstream.catalogue import Target

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shared.clock import Clock
    from shared.core.callers import Caller
    from shared.core.model import SampleKey, SamplingSession
    from workers.samples.live import LiveSample
    from workers.upstream.pool import UpstreamPool

OWNER: Final = "worker-000000001"
OTHER_OWNER: Final = "worker-000000002"
SESSION_ID: Final = ids.new_session_id(bytes(16), ids.ANONYMOUS_SECRET)
MODEL: Final = ModelRef(base_model="sim/tiny")
TARGET: Final = Target("sim/tiny", "sim/tiny", 4096)
DONE: Final = Ending(State.READY, b"result")
AWAY: Final = StoreUnavailable("the store is away", maybe_done=False)
# A store that does not answer is asked again soon.
SOON: Final = Pace(store_retry_first_s=0.001, store_retry_longest_s=0.001)
REPLY_LOST: Final = StoreUnavailable("the store's reply was lost", maybe_done=True)


def session(number: int = 0, session_id: str = SESSION_ID, secret: bytes = ids.ANONYMOUS_SECRET) -> SamplingSession:
    return ids.sampling_session(session_id, str(number).encode(), MODEL, secret)


def spec(tokens: Sequence[int] = (10, 11, 12), n: int = 1, **more: Any) -> SampleSpec:
    prompt = ",".join(map(str, tokens)).encode()
    digest = blake2b(prompt + b"/%d" % n, digest_size=16).digest()
    params = more.pop("params", SamplingParams(max_tokens=4, seed=7))
    return SampleSpec(prompt, len(tokens), n, params, digest=digest, **more)


def openai_of(pool: UpstreamPool, clock: Clock) -> OpenAiProxy:
    """Make a proxy that nobody uses."""
    return OpenAiProxy(pool, None, Counters(), clock, 60.0, lambda: 0.5)  # type: ignore[arg-type]


class GatedStore(MemoryStore):
    """A store whose calls wait for `gate` while there is one."""

    def __init__(self, server: MemoryServer) -> None:
        super().__init__(server)
        self.gate: asyncio.Event | None = None
        self.announced: list[tuple[str, int]] = []

    async def _enter(self) -> None:
        await super()._enter()
        if self.gate is not None:
            await self.gate.wait()

    def announce(self, session_key: str, seq_id: int) -> None:
        self.announced.append((session_key, seq_id))
        super().announce(session_key, seq_id)


class ScriptedExecutor:
    """Executions last until the test ends them."""

    def __init__(self) -> None:
        self.started: list[SampleKey] = []
        self.interrupted: list[SampleKey] = []
        self._ends: dict[SampleKey, asyncio.Future[Ending]] = {}

    async def execute(self, sample: LiveSample) -> Ending:
        self.started.append(sample.key)
        end: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self._ends[sample.key] = end
        try:
            return await end
        except asyncio.CancelledError:
            self.interrupted.append(sample.key)
            raise

    def finish(self, key: SampleKey, ending: Ending = DONE) -> None:
        self._ends.pop(key).set_result(ending)

    def crash(self, key: SampleKey, error: Exception) -> None:
        self._ends.pop(key).set_exception(error)


class WorkerBench:
    """One worker's dispatcher on a store that it may share with others."""

    def __init__(
        self, server: MemoryServer | None = None, owner: str = OWNER, pace: Pace = SOON, **settings: Any
    ) -> None:
        self.server = server or MemoryServer(ManualClock(), Random(7))
        self.clock = self.server.clock
        self.owner = owner
        self.settings = Settings(**settings)
        self.store = GatedStore(self.server)
        self.executor = ScriptedExecutor()
        self.losses = asyncio.Event()
        self.waiters = Waiters(self.settings.undelivered_ttl_s)
        self.counters = Counters()
        self.unfetched = UnfetchedResults()
        self.dispatcher = Dispatcher(
            self.store,
            self.executor,
            self.waiters,
            self.counters,
            self.clock,
            owner,
            self.settings,
            self.unfetched,
            self.on_loss,
            pace,
        )
        self.key_usage = self.dispatcher.quota.key_usage

    def on_loss(self) -> None:
        """Note that a record that must be there is not."""
        self.losses.set()

    async def submit(
        self,
        seq_id: int = 1,
        wanted: SampleSpec | None = None,
        of: SamplingSession | None = None,
        caller: Caller = ANONYMOUS,
    ) -> None:
        await self.dispatcher.submit(of or session(), seq_id, wanted or spec(), TARGET, caller)

    async def started(self, seq_id: int = 1) -> SampleKey:
        """Submit, and wait until it executes."""
        await self.submit(seq_id)
        key = session().key(seq_id)
        await until(lambda: key in self.executor.started)
        return key

    def state(self, key: SampleKey) -> State | None:
        stored = self.server.samples.get(key)
        return stored.header.state if stored is not None else None

    def holds_nothing(self) -> bool:
        return not (self.dispatcher.in_flight or self.dispatcher.quota.in_flight_bytes or self.dispatcher.session_ids())
