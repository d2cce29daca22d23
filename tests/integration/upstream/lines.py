"""A worker's way to one upstream: client, forwarder, pool, as the tests of this folder use them."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

from shared.clock import ManualClock, SystemClock
from shared.config import Settings
from shared.core import ids, retry
from shared.core.faults import Fault
from shared.core.record import Claim
from shared.core.upstream_protocol import ClientChoice, ProtocolChoice, UpstreamProtocol
from shared.counters import Counters
from tests.memory_store import MemoryServer, MemoryStore
from tests.worker_bench import OWNER, TARGET, session, spec
from workers.samples.execution import Executor
from workers.samples.live import LiveSample
from workers.samples.quota import Holding
from workers.upstream.adapter_loading import AdapterLoader
from workers.upstream.adapters import Adapters
from workers.upstream.catalogue import Catalogue
from workers.upstream.connector import make_client, make_probe_session
from workers.upstream.forwarder import Forwarder
from workers.upstream.pool import UpstreamPool

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from shared.clock import Clock
    from shared.core.lifecycle import State
    from shared.core.model import SampleSpec
    from workers.samples.live import Ending
    from workers.upstream.client.dial import Resolve
    from workers.upstream.upstream import Upstream

ASKED: Final = {"model": "sim/tiny", "max_tokens": 2, "logprobs": 0, "return_token_ids": True}


# The adapter that a line sends its samples through; the fixture `both_clients` sets it.
chosen_client = ClientChoice.OWN


class Line:
    """A forwarder with a client of its own, and one upstream."""

    def __init__(
        self,
        url: str,
        resolve: Resolve | None = None,
        clock: Clock | None = None,
        protocol: ProtocolChoice = ProtocolChoice.COMPLETIONS,
        source_ip: str | None = None,
        **settings: Any,
    ) -> None:
        defaults = {"read_timeout_s": 30.0, "connect_timeout_s": 30.0, "upstream_client": chosen_client}
        chosen = Settings(upstreams=(url,), **{**defaults, **settings})
        self.client = make_client(chosen, source_ip, resolve)
        self.probes = make_probe_session(chosen, None)
        self.clock = clock or SystemClock()
        self.forwarder = Forwarder(self.client, self.probes, self.clock)
        self.pool = UpstreamPool((url,), self.forwarder, Catalogue((), ""), self.clock, protocol=protocol)
        self.upstream = self.pool.choose("sim/tiny")
        self.counters = Counters()

    async def ask(
        self, name: str = "r-a1", upstream: Upstream | None = None, prompt: Sequence[int] = (10,)
    ) -> bytes | bytearray | Fault:
        to = upstream or self.upstream
        return await self.forwarder.post(to, to.samples_urls[to.protocol], _asked(to, prompt), {"X-Request-Id": name})

    async def fault(self) -> Fault:
        outcome = await self.ask()
        assert isinstance(outcome, Fault), outcome
        assert not self.upstream.attempts
        return outcome

    async def execute(self, seq_id: int) -> State:
        return (await self.sample(seq_id, spec())).state

    async def sample(self, seq_id: int, wanted: SampleSpec) -> Ending:
        """Execute a sample as a worker does, with `--max-reexecutions` of 1 and no pauses between attempts."""
        store = MemoryStore(MemoryServer(ManualClock(), random.Random(7)))
        adapters = Adapters(
            self.pool,
            AdapterLoader(self.pool, self.forwarder, store, self.counters, OWNER, 60.0),
            self.clock,
            wait_s=60.0,
        )
        executor = Executor(
            self.pool,
            adapters,
            self.forwarder,
            store,
            self.counters,
            self.clock,
            retry.Policy(),
            random.random,
            sleep=lambda _: asyncio.sleep(0),
        )
        claim = Claim(OWNER, 1, 1, wanted.digest)
        running = LiveSample(
            session(), session().key(seq_id), ids.request_id(session(), seq_id), wanted, claim, TARGET, 0, Holding(b"")
        )
        return await executor.execute(running)

    async def close(self) -> None:
        await self.client.close()
        await self.probes.close()


def _asked(upstream: Upstream, prompt: Sequence[int]) -> bytes:
    if upstream.protocol is UpstreamProtocol.COMPLETIONS:
        return json.dumps({**ASKED, "prompt": prompt}).encode()
    params = {"max_tokens": ASKED["max_tokens"], "logprobs": ASKED["logprobs"]}
    return json.dumps({"model": ASKED["model"], "token_ids": prompt, "sampling_params": params}).encode()


@asynccontextmanager
async def line(url: str, resolve: Resolve | None = None, **settings: Any) -> AsyncIterator[Line]:
    made = Line(url, resolve, **settings)
    try:
        yield made
    finally:
        await made.close()
