"""Answer everything around sampling: configuration, sessions, heartbeats, telemetry, capabilities, health."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from shared.core import ids
from shared.core.errors import SessionFinished, StoreError, StoreFull
from shared.wire.sdk import calls
from workers.api import replies, training
from workers.samples.messages import finish_message

if TYPE_CHECKING:
    from shared.http.request import Request
    from workers.api.replies import Reply, Streamed
    from workers.parts import WorkerParts

# A heartbeat is answered well within the SDK's 10 s even when the store is not; the next one comes in 10 s.
_HEARTBEAT_STORE_S: Final = 2.0
HEALTHY: Final = replies.ok(b'{"status":"ok"}')


async def client_config(parts: WorkerParts, request: Request) -> Reply:
    """Return the flags for this SDK version; this is the first request of every client."""
    version = calls.decode_client_config(request.body)
    return replies.ok(calls.client_config(version, session_poll=parts.live.settings.session_poll))


async def dynamic_config(parts: WorkerParts, request: Request) -> Reply:
    calls.decode_client_config(request.body)
    return replies.ok(calls.DYNAMIC_CONFIG)


async def create_session(parts: WorkerParts, request: Request) -> Reply | Streamed:
    calls.decode_body(calls.CreateSession, request.body)
    if parts.trainer is not None:
        return await training.create_session(parts, request, parts.trainer)
    session_id = ids.new_session_id(parts.random_bytes(ids.RANDOM_BYTES), request.caller.secret)
    await parts.sessions.admit(session_id, request.caller)
    parts.sessions.note(session_id)
    return replies.ok(calls.session(session_id))


async def session_heartbeat(parts: WorkerParts, request: Request) -> Reply | Streamed:
    """Keep a session alive. Only a finished one gets 410: a heartbeat revives a session that the store lost."""
    named = calls.decode_body(calls.Heartbeat, request.body).session_id
    session_id = training.session_name(parts, named, request)
    agreed = None
    if session_id != named and not parts.sessions.is_admitted(session_id):
        # Anybody can make up an id: only the training server knows whether there is such a session.
        agreed = await training.heartbeat(parts, request)
        if not agreed.is_success:
            return training.passed_back(agreed)
    alive = True
    try:
        async with asyncio.timeout(_HEARTBEAT_STORE_S):
            await parts.sessions.require_alive(session_id, request.caller)
            alive = await parts.sessions.touch(session_id)
    except StoreFull:
        # There is no room for a session that the store does not know; the next heartbeat tries again.
        pass
    except (StoreError, TimeoutError):
        # It is written down when the store is back, and time without it does not count.
        parts.sessions.note(session_id)
    if not alive:
        raise SessionFinished("this session was finished")
    if session_id == named:
        return replies.ok()
    return training.passed_back(agreed or await training.heartbeat(parts, request))


async def finish_session(parts: WorkerParts, request: Request) -> Reply | Streamed:
    """Finish a session; the first call wins. What runs is cancelled on every worker."""
    named = request.path["session_id"]
    session_id = training.session_name(parts, named, request)
    calls.decode_finish(request.body)
    agreed = None
    if session_id != named and not parts.sessions.is_admitted(session_id):
        agreed = await training.finish(parts, request)
        if not agreed.is_success:
            return training.passed_back(agreed)
    if await parts.store.finish_session(session_id, parts.clock.wall_ms()):
        await parts.store.broadcast(finish_message(session_id))
    parts.sessions.mark_finished(session_id)
    parts.dispatcher.end_session(session_id)
    if session_id == named:
        return replies.ok()
    return training.passed_back(agreed or await training.finish(parts, request))


async def telemetry(parts: WorkerParts, request: Request) -> Reply:
    """Accept and discard a body unread: at times it holds the caller's API key. The SDK waits for this reply."""
    return replies.ok(calls.TELEMETRY_ACCEPTED)


async def server_capabilities(parts: WorkerParts, request: Request) -> Reply:
    if not parts.pool.catalogue.known:
        await parts.pool.learn_models()
    models = parts.pool.catalogue.base_models()
    return replies.ok(calls.capabilities(models, trainable=parts.trainer is not None))


async def healthz(parts: WorkerParts, request: Request) -> Reply:
    return HEALTHY
