"""All that a worker has towards its upstreams: built together, closed together.

What the handlers of one worker share. Built once, in `workers/worker.py`; nothing is looked up by name.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from shared.core.retry import Policy
from shared.loop.turns import TurnLimit
from workers.samples.execution import Executor
from workers.upstream.adapter_loading import AdapterLoader
from workers.upstream.adapters import Adapters
from workers.upstream.catalogue import Catalogue
from workers.upstream.connector import make_client, make_probe_session
from workers.upstream.forwarder import Forwarder
from workers.upstream.pool import UpstreamPool
from workers.upstream.published import PublishedUpstreams

if TYPE_CHECKING:
    from collections.abc import Callable

    from shared.clock import Clock
    from shared.config import Settings, WorkerConfig
    from shared.core.callers import Keyring
    from shared.counters import Counters
    from shared.store.contract import Store
    from workers.passing.openai import OpenAiProxy
    from workers.passing.training_server import TrainingServer
    from workers.samples.dispatcher import Dispatcher
    from workers.samples.execution import MarkPaused
    from workers.samples.expiry import DeliveryExpiry
    from workers.samples.live import Executes
    from workers.samples.recent_results import UnfetchedResults
    from workers.samples.sessions import Sessions
    from workers.samples.tracing import Tracing
    from workers.samples.waiters import Waiters


class UpstreamSide:
    def __init__(
        self, config: WorkerConfig, store: Store, counters: Counters, clock: Clock, mark_paused: MarkPaused
    ) -> None:
        settings = config.settings
        self._client = make_client(settings, config.source_ip)
        self._questions = make_probe_session(settings, config.source_ip)
        forwarder = Forwarder(self._client, self._questions, clock, settings.upstream_api_key)
        catalogue = Catalogue(settings.models, settings.lora_name_template, settings.lora_path)
        self.pool = UpstreamPool(settings.upstreams, forwarder, catalogue, clock, protocol=settings.upstream_protocol)
        self.published = PublishedUpstreams(store, self.pool, settings.upstreams)
        loader = AdapterLoader(self.pool, forwarder, store, counters, config.instance, settings.lora_wait_s)
        self.adapters = Adapters(self.pool, loader, clock, settings.lora_wait_s)
        self._tracing = _tracing(config)
        self.executor = Executor(
            self.pool,
            self.adapters,
            self._tracing.forwarder(forwarder) if self._tracing is not None else forwarder,
            counters,
            clock,
            retry_policy(settings),
            random.random,
            mark_paused=mark_paused,
        )
        self.executes: Executes = self._tracing.executor(self.executor) if self._tracing is not None else self.executor

    async def close(self) -> None:
        await self.adapters.close()
        await self.pool.close()
        self._client.close()
        await self._questions.close()
        if self._tracing is not None:
            await self._tracing.close()


def _tracing(config: WorkerConfig) -> Tracing | None:
    if config.settings.otel_endpoint is None:
        return None
    # Its libraries are an extra, and 20 MB of memory.
    from workers.samples.tracing import open_tracing

    return open_tracing(config.settings.otel_endpoint, config.slot)


def retry_policy(settings: Settings) -> Policy:
    return Policy(
        max_reexecutions=settings.max_reexecutions,
        retry_ambiguous=settings.retry_ambiguous,
        upstream_wait_s=settings.upstream_wait_s,
    )


# A few milliseconds of submissions, and of polls that are woken.
_REQUESTS_PER_TURN: Final = 16


@dataclass(slots=True)
class Live:
    """What a reload may change while requests are served."""

    settings: Settings
    keyring: Keyring


@dataclass(frozen=True, slots=True)
class WorkerParts:
    live: Live
    store: Store
    dispatcher: Dispatcher
    waiters: Waiters
    sessions: Sessions
    pool: UpstreamPool
    published: PublishedUpstreams
    adapters: Adapters
    expiry: DeliveryExpiry
    unfetched: UnfetchedResults
    counters: Counters
    clock: Clock
    random_bytes: Callable[[int], bytes]
    openai: OpenAiProxy
    trainer: TrainingServer | None = None
    turns: TurnLimit = field(default_factory=lambda: TurnLimit(_REQUESTS_PER_TURN))
