"""Everything around sampling: configuration, sessions, heartbeats, telemetry, capabilities, health."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from shared.core import ids
from shared.core.errors import SessionFinished, StoreError
from shared.wire.sdk import calls
from workers.api import replies, training
from workers.samples.messages import finish_message

if TYPE_CHECKING:
    from shared.http.request import Request
    from workers.api.replies import Reply, Streamed
    from workers.parts import Deps

# A heartbeat is answered well within the SDK's 10 s even when the store is not; the next one comes in 10 s.
_HEARTBEAT_STORE_S: Final = 2.0
HEALTHY: Final = replies.ok(b'{"status":"ok"}')


async def client_config(deps: Deps, request: Request) -> Reply:
    """The flags that shape how this SDK version samples; the first request of every client."""
    version = calls.decode_client_config(request.body)
    return replies.ok(calls.client_config(version, session_poll=deps.live.settings.session_poll))


async def dynamic_config(deps: Deps, request: Request) -> Reply:
    calls.decode_client_config(request.body)
    return replies.ok(calls.dynamic_config())


async def create_session(deps: Deps, request: Request) -> Reply | Streamed:
    calls.decode_create_session(request.body)
    if deps.trainer is not None:
        return await training.create_session(deps, request, deps.trainer)
    session_id = ids.new_session_id(deps.random_bytes(ids.RANDOM_BYTES), request.caller.secret)
    await deps.sessions.open(session_id, request.caller, deps.live.settings.session_timeout_s)
    return replies.ok(calls.session(session_id))


async def session_heartbeat(deps: Deps, request: Request) -> Reply | Streamed:
    """410 only after a finish: a session that the store lost is alive again by this."""
    named = calls.decode_heartbeat(request.body).session_id
    session_id = training.session_name(deps, named, request)
    deps.sessions.note(session_id)
    try:
        async with asyncio.timeout(_HEARTBEAT_STORE_S):
            alive = await deps.sessions.touch(session_id)
    except (StoreError, TimeoutError):
        # Noted above: it is written down when the store is back, and time without it does not count.
        alive = True
    if not alive:
        raise SessionFinished("this session was finished")
    return replies.ok() if session_id == named else await training.heartbeat(deps, request)


async def finish_session(deps: Deps, request: Request) -> Reply | Streamed:
    """The first one wins; what runs is cancelled, on every worker."""
    named = request.path["session_id"]
    session_id = training.session_name(deps, named, request)
    calls.decode_finish(request.body)
    if await deps.store.finish_session(session_id, deps.clock.wall_ms()):
        await deps.store.broadcast(finish_message(session_id))
    deps.sessions.mark_finished(session_id)
    deps.dispatcher.end_session(session_id)
    return replies.ok() if session_id == named else await training.finish(deps, request)


async def telemetry(deps: Deps, request: Request) -> Reply:
    """Taken and dropped, unread: it holds the caller's API key at times, and the SDK waits for this reply."""
    return replies.ok(calls.TELEMETRY_ACCEPTED)


async def server_capabilities(deps: Deps, request: Request) -> Reply:
    if not deps.pool.catalogue.known:
        await deps.pool.learn_models()
    models = deps.pool.catalogue.base_models()
    return replies.ok(calls.capabilities(models, trainable=deps.trainer is not None))


async def healthz(deps: Deps, request: Request) -> Reply:
    return HEALTHY
