"""One executor with the upstreams of a script, whose samples are executed one at a time."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

from shared.clock import ManualClock
from shared.core import ids, retry
from shared.core.adapters import Adapter
from shared.core.faults import BreakKind, Fault, FaultClass, classify_break
from shared.core.model import Category
from shared.core.record import Claim
from shared.core.upstream_protocol import ProtocolChoice
from shared.counters import Counters
from tests.worker_bench import OWNER, TARGET, session, spec
from workers.samples.execution import Executor
from workers.samples.live import LiveSample
from workers.samples.quota import Holding
from workers.upstream.catalogue import Catalogue, Target
from workers.upstream.pool import UpstreamPool

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from yarl import URL

    from shared.core.lifecycle import State
    from shared.core.model import SampleKey, SampleSpec
    from workers.upstream.client.port import Exchange
    from workers.upstream.upstream import Upstream

BUSY = Fault(FaultClass.NEVER_EXECUTED, "upstream answered 503: busy")
REFUSED = classify_break(BreakKind.CONNECT_REFUSED, "http://a")
RESET = classify_break(BreakKind.RESET_BEFORE_STATUS, "http://a")
CUT = classify_break(BreakKind.BODY_CUT, "http://a")
MISSING = Fault(FaultClass.NEVER_EXECUTED, "adapter tinker://r/c: no files", Category.USER, wait_s=60.0)
ADAPTER = Adapter("tinker://r/c", "r--c", "/adapters/r/c")
ABORTED = Fault(FaultClass.ABORTED, "aborted after 3 tokens")
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def answer(asked: dict[str, Any]) -> bytes:
    """A right reply to a request, small: `logprobs` all -1."""
    if "token_ids" in asked:
        return generation(asked)
    tokens = [5] * asked["max_tokens"]
    scores: list[Any] = [None, *({str(token): {"logprob": -2.0}} for token in asked["prompt"][1:])]
    choice = {
        "logprobs": {"token_logprobs": [-1.0] * len(tokens)},
        "finish_reason": "length",
        "token_ids": tokens,
        "prompt_logprobs": scores if "prompt_logprobs" in asked else None,
    }
    choices = [{**choice, "index": index} for index in range(asked["n"])]
    return json.dumps({"choices": choices, "usage": {"prompt_tokens_details": None}}).encode()


def generation(asked: dict[str, Any], versions: Sequence[str] = ("default",)) -> bytes:
    """The same of a generation, with one token or more by each of the `versions` of the weights."""
    params = asked["sampling_params"]
    place = {"token_id": 5, "logprob": -1.0, "top_logprobs": []}
    tokens = max(params["max_tokens"], len(versions))
    spans = [{"version": version, "start": n, "end": n + 1} for n, version in enumerate(versions)]
    choice = {
        "finish_reason": "length",
        "token_ids": [5] * tokens,
        "weight_versions": spans,
        "logprobs": {"content": [place] * tokens},
    }
    rows: list[Any] = [None, *({str(token): {"logprob": -2.0}} for token in asked["token_ids"][1:])]
    scores = rows if "prompt_logprobs" in params else None
    choices = [{**choice, "index": index} for index in range(params["n"])]
    return json.dumps({"choices": choices, "usage": None, "prompt_logprobs": scores}).encode()


class FakeForwarder:
    """Meets requests with the faults of a script, then answers rightly."""

    def __init__(self, faults: Sequence[Fault | None] = ()) -> None:
        self.faults = list(faults)
        self.asked: list[dict[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self.upstreams: list[str] = []
        self.paths: list[str] = []
        self.versions: Sequence[str] = ("default",)
        self.key_digests: list[bytes] = []

    async def post(
        self, upstream: Upstream, url: URL, body: bytes, headers: Mapping[str, str], exchange: Exchange
    ) -> bytes | Fault:
        self.key_digests.append(exchange.key_digest)
        self.asked.append(json.loads(body))
        self.paths.append(url.path)
        self.headers.append(headers)
        self.upstreams.append(upstream.url)
        fault = self.faults.pop(0) if self.faults else None
        if fault is None and len(self.versions) > 1:
            return generation(self.asked[-1], self.versions)
        return fault or answer(self.asked[-1])

    async def ask(self, upstream: Upstream, *_: object) -> tuple[int, bytes]:
        """It has /inference/v1/generate."""
        return 400, b""


class FakeAdapters:
    """Refuses to place an adapter as a script says, then has it."""

    def __init__(self) -> None:
        self.faults: list[Fault | None] = []
        self.lost_at: list[str] = []

    def ready(self, adapter: Adapter) -> bool:
        return not self.faults

    async def place(self, adapter: Adapter) -> Fault | None:
        await asyncio.sleep(0)
        return self.faults.pop(0)

    def lost(self, adapter: Adapter, upstream: Upstream, fault: Fault) -> Fault:
        self.lost_at.append(upstream.url)
        return MISSING


class Bench:
    def __init__(
        self,
        *faults: Fault | None,
        urls: Sequence[str] = ("http://a",),
        protocol: ProtocolChoice = ProtocolChoice.COMPLETIONS,
        **policy: Any,
    ) -> None:
        self.clock = ManualClock()
        self.forwarder = FakeForwarder(faults)
        self.counters = Counters()
        self.slept_s: list[float] = []
        self.paused: list[str | None] = []
        self.marks: list[bool] = []
        forwarder: Any = self.forwarder
        self.pool = UpstreamPool(urls, forwarder, Catalogue((), ""), self.clock, protocol=protocol)
        self.adapters = FakeAdapters()
        self.executor = Executor(
            self.pool,
            self.adapters,  # type: ignore[arg-type] # three of its methods are asked for
            self.forwarder,  # type: ignore[arg-type] # all that is asked of it is `post`
            self,  # type: ignore[arg-type] # all that is asked of the store is `mark_paused`
            self.counters,
            self.clock,
            retry.Policy(**policy),
            rng_unit=lambda: 0.0,
            sleep=self._sleep,
        )

    async def _sleep(self, delay_s: float) -> None:
        self.slept_s.append(delay_s)
        self.paused.append(self.sample.paused_reason)
        self.clock.advance(delay_s)
        await asyncio.sleep(0)

    def mark_paused(self, key: SampleKey, claim: Claim, *, paused: bool) -> None:
        assert (key, claim) == (self.sample.key, self.sample.claim)
        self.marks.append(paused)

    async def execute(
        self, wanted: SampleSpec | None = None, trace: str | None = None, target: Target = TARGET
    ) -> tuple[State, bytes]:
        wanted = wanted or spec()
        claim = Claim(OWNER, 1, wanted.num_samples, wanted.digest)
        self.sample = LiveSample(
            session(), session().key(3), ids.request_id(session(), 3), wanted, claim, target, 0, Holding(b"K"), trace
        )
        ending = await self.executor.execute(self.sample)
        return ending.state, ending.payload

    @property
    def attempts(self) -> list[str]:
        return [headers["X-Request-Id"].rpartition("-")[2] for headers in self.forwarder.headers]


def faults_of(bench: Bench) -> dict[str, int]:
    """How often by class; those that were."""
    counts = bench.counters.snapshot().items()
    return {name.removeprefix("faults_"): count for name, count in counts if name.startswith("faults_") and count}
