"""All that a worker has towards its upstreams: built together, closed together."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from shared.core.retry import Policy
from workers.adapter_loading import AdapterLoader
from workers.adapters import Adapters
from workers.connector import make_client, make_probe_session
from workers.execution import Executor
from workers.forwarder import Forwarder
from workers.models import Catalogue
from workers.pool import UpstreamPool
from workers.registry import Registry

if TYPE_CHECKING:
    from shared.clock import Clock
    from shared.config import Settings, WorkerConfig
    from shared.counters import Counters
    from shared.store.base import Store
    from workers.execution import MarkPaused
    from workers.running import Executes
    from workers.tracing import Tracing


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
        self.registry = Registry(store, self.pool, settings.upstreams)
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
    from workers.tracing import open_tracing

    return open_tracing(config.settings.otel_endpoint, config.slot)


def retry_policy(settings: Settings) -> Policy:
    return Policy(
        max_reexecutions=settings.max_reexecutions,
        retry_ambiguous=settings.retry_ambiguous,
        upstream_wait_s=settings.upstream_wait_s,
    )
