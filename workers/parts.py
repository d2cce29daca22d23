"""What one worker is made of: built in one place, shared by handlers and duties, closed together."""

from __future__ import annotations

import os
import random
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from shared.core.callers import Keyring
from shared.core.retry import Policy
from shared.log import Throttle
from shared.loop.turns import TurnLimit
from workers.passing.openai import OpenAiProxy
from workers.passing.training_server import TrainingServer
from workers.samples.dispatcher import Dispatcher
from workers.samples.execution import Executor
from workers.samples.expiry import DeliveryExpiry, UnfetchedResults
from workers.samples.sessions import Sessions
from workers.samples.waiters import Waiters
from workers.upstream.adapter_loading import AdapterLoader
from workers.upstream.adapters import Adapters
from workers.upstream.catalogue import Catalogue
from workers.upstream.connector import make_client, make_probe_session, make_session, make_training_session
from workers.upstream.forwarder import Forwarder
from workers.upstream.pool import UpstreamPool
from workers.upstream.published import PublishedUpstreams

if TYPE_CHECKING:
    from collections.abc import Callable

    from shared.clock import Clock
    from shared.config import Settings, WorkerConfig
    from shared.counters import Counters
    from shared.store.contract import Store
    from workers.samples.tracing import Tracing

# A few milliseconds of submissions, and of polls that are woken.
_REQUESTS_PER_TURN: Final = 16
# Of long bodies; most steps take a few milliseconds.
_STEPS_PER_TURN: Final = 1
_UNREADABLE_EVERY_S: Final = 30.0


@dataclass(slots=True)
class Live:
    """The settings and keys that a reload may change while requests are served."""

    settings: Settings
    keyring: Keyring


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """The parts of one worker, each under its own name. `resources` closes what has connections of its own."""

    live: Live
    store: Store
    dispatcher: Dispatcher
    executor: Executor
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
    # For what takes more than one turn of the loop, step by step.
    long_work: TurnLimit = field(default_factory=lambda: TurnLimit(_STEPS_PER_TURN))
    # For stored bytes that no gateway wrote, by what they should be.
    unreadable_logs: Throttle = field(default_factory=lambda: Throttle(_UNREADABLE_EVERY_S))
    resources: AsyncExitStack = field(default_factory=AsyncExitStack)


def build_parts(
    config: WorkerConfig, store: Store, counters: Counters, clock: Clock, on_loss: Callable[[], None]
) -> WorkerParts:
    """Build the parts of one worker around its store. `on_loss`: see `Dispatcher`."""
    settings, source_ip, resources = config.settings, config.source_ip, AsyncExitStack()
    client = make_client(settings, source_ip)
    resources.push_async_callback(client.close)
    probe_session = make_probe_session(settings, source_ip)
    resources.push_async_callback(probe_session.close)
    forwarder = Forwarder(client, probe_session, clock, settings.upstream_api_key)
    catalogue = Catalogue(settings.models, settings.lora_name_template, settings.lora_path)
    pool = UpstreamPool(settings.upstreams, forwarder, catalogue, clock, protocol=settings.upstream_protocol)
    resources.push_async_callback(pool.close)
    loader = AdapterLoader(pool, forwarder, store, counters, config.instance, settings.lora_wait_s)
    adapters = Adapters(pool, loader, clock, settings.lora_wait_s)
    resources.push_async_callback(adapters.close)
    tracing = _tracing(config, resources)
    traced_forwarder = tracing.forwarder(forwarder) if tracing is not None else forwarder
    policy = Policy(settings.max_reexecutions, settings.retry_ambiguous, settings.upstream_wait_s)
    executor = Executor(pool, adapters, traced_forwarder, store, counters, clock, policy, random.random)
    traced_executor = tracing.executor(executor) if tracing is not None else executor
    waiters = Waiters(settings.undelivered_ttl_s)
    unfetched = UnfetchedResults()
    dispatcher = Dispatcher(
        store, traced_executor, waiters, counters, clock, config.instance, settings, unfetched, on_loss
    )
    passed_session = make_session(settings, source_ip)
    resources.push_async_callback(passed_session.close)
    return WorkerParts(
        live=Live(settings, Keyring(settings.api_keys)),
        store=store,
        dispatcher=dispatcher,
        executor=executor,
        waiters=waiters,
        sessions=Sessions(store, clock, settings.session_timeout_s),
        pool=pool,
        published=PublishedUpstreams(store, pool, settings.upstreams),
        adapters=adapters,
        expiry=DeliveryExpiry(store, settings, counters, unfetched, clock),
        unfetched=unfetched,
        counters=counters,
        clock=clock,
        random_bytes=os.urandom,
        openai=OpenAiProxy(pool, passed_session, counters, clock, settings.upstream_wait_s, random.random),
        trainer=_trainer(settings, source_ip, resources),
        resources=resources,
    )


def _tracing(config: WorkerConfig, resources: AsyncExitStack) -> Tracing | None:
    if config.settings.otel_endpoint is None:
        return None
    # Its libraries are an extra, and take 20 MB of memory.
    from workers.samples.tracing import open_tracing

    tracing = open_tracing(config.settings.otel_endpoint, config.slot)
    resources.push_async_callback(tracing.close)
    return tracing


def _trainer(settings: Settings, source_ip: str | None, resources: AsyncExitStack) -> TrainingServer | None:
    if settings.training_upstream is None:
        return None
    session = make_training_session(settings, source_ip)
    key, forward = settings.training_api_key, settings.training_forward_key
    trainer = TrainingServer(settings.training_upstream, session, api_key=key, forward_key=forward)
    resources.push_async_callback(trainer.close)
    return trainer
