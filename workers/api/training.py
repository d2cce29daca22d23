"""Answer with a training server, and keep sessions, futures and saved weights in agreement with it.

Everything that is not about sampling is streamed through. A few small calls are read on the way:

    create_session              made there, under an id that is kept; known here under a name of the caller's own
    session_heartbeat, finish   done here and there; the client gets the trainer's answer
    save_weights_for_sampler    its future is wrapped, so that any worker knows what is being polled
    retrieve_future             of a wrapped future: a sampling session in the result is given an id of ours
                                of any other foreign future: streamed through
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

from shared.core import trainer_ids
from shared.core.callers import REVOKED
from shared.core.errors import (
    NotFound,
    NotImplementedHere,
    Overloaded,
    StoreError,
    Unauthorized,
    UpstreamBroke,
    UpstreamUnavailable,
)
from shared.core.lifecycle import Answer
from shared.core.model import Category, Failure
from shared.core.trainer_ids import TrainerFuture
from shared.http.reply import send_response
from shared.wire import trainer as wire
from shared.wire.sdk import calls
from workers.api import replies
from workers.api.replies import Streamed
from workers.passing.relay import relay, while_connected

if TYPE_CHECKING:
    from starlette.types import Send

    from shared.http.request import Request
    from workers.api.replies import Reply
    from workers.parts import WorkerParts
    from workers.passing.training_server import Outgoing, TrainerReply, TrainingServer

# The SDK waits 10 s for a heartbeat, of which the store may have 2.
_HEARTBEAT_S: Final = 7.0
# A sampling session is bound without it, too.
_WEIGHTS_S: Final = 5.0
_ELSEWHERE: Final = (
    "this gateway samples only: training and other requests need a training server (--training-upstream)"
)
_TROUBLE: Final = (UpstreamUnavailable, UpstreamBroke)


def trainer_of(parts: WorkerParts) -> TrainingServer:
    """Return the training server. Raises `NotImplementedHere` if there is none."""
    if parts.trainer is None:
        raise NotImplementedHere(_ELSEWHERE)
    return parts.trainer


async def pass_on(parts: WorkerParts, request: Request) -> Streamed:
    """Pass on whatever this gateway does not answer itself."""
    trainer = trainer_of(parts)
    parts.dispatcher.quota.require_memory(request.caller)
    outgoing = trainer.as_it_comes(request)
    parts.counters.training_requests += 1

    async def run(send: Send) -> None:
        await trainer.pass_on(request, outgoing, send)

    return Streamed(run)


def session_name(parts: WorkerParts, session_id: str, request: Request) -> str:
    """Return the name of a session here. Raises `NotFound`."""
    name = trainer_ids.session_name(session_id, request.caller.secret, foreign=parts.trainer is not None)
    if name is None:
        raise NotFound("there is no such session")
    return name


async def create_session(parts: WorkerParts, request: Request, trainer: TrainingServer) -> Streamed:
    """Make a session there and enter it here. Once it is made nothing may refuse it: it would be made again."""
    await parts.sessions.require_quota(request.caller)
    reply = await _ask(parts, request, trainer.whole(request))
    if reply.is_success:
        session_id = wire.session_id_of(reply.body)
        if session_id is None:
            raise UpstreamBroke("the training server's reply to create_session has no session_id that can be used")
        with suppress(StoreError, Overloaded):
            name = session_name(parts, session_id, request)
            await parts.sessions.admit(name, request.caller)
            parts.sessions.note(name)
    return passed_back(reply)


async def heartbeat(parts: WorkerParts, request: Request) -> TrainerReply:
    return await _ask(parts, request, trainer_of(parts).whole(request), _HEARTBEAT_S)


async def finish(parts: WorkerParts, request: Request) -> TrainerReply:
    return await _ask(parts, request, trainer_of(parts).whole(request))


async def require_session(parts: WorkerParts, request: Request, session_id: str, name: str) -> None:
    """Ask the training server for a session that no worker has seen yet: anybody can make up an id.

    `name`: its name here. Raise `NotFound` if there is none, and `Overloaded` if the server does not say.
    """
    if parts.sessions.is_admitted(name) or await parts.sessions.is_recorded(name):
        return
    try:
        reply = await _ask(parts, request, trainer_of(parts).alive(request, session_id), _HEARTBEAT_S)
        _require_calm(reply.status)
    except _TROUBLE as error:
        raise Overloaded("trainer", str(error)) from None
    if not reply.is_success:
        raise NotFound("the training server knows no such session")


async def base_model_of(parts: WorkerParts, request: Request, path: str) -> str | None:
    """Ask the training server for the base model of saved weights; None if it, or the server, is unknown."""
    if parts.trainer is None:
        return None
    try:
        reply = await _ask(parts, request, parts.trainer.weights(request, path), _WEIGHTS_S)
    except _TROUBLE:
        return None
    return wire.base_model_of(reply.body) if reply.is_success else None


async def save_weights_for_sampler(parts: WorkerParts, request: Request) -> Streamed:
    """Pass a save on and wrap its future."""
    trainer = trainer_of(parts)
    session_id = trainer_ids.session_of_model(wire.decode_save_for_sampler(request.body).model_id)
    reply = await _ask(parts, request, trainer.whole(request))
    promised = wire.promised_id(reply.body) if reply.is_success else None
    if promised is None or not trainer_ids.is_usable(promised) or not trainer_ids.is_usable(session_id):
        return passed_back(reply)
    future = TrainerFuture(promised, session_name(parts, session_id, request))
    wrapped = trainer_ids.wrap_future(future, request.caller.secret)
    return passed_back(reply, wire.replaced(reply.body, "request_id", wrapped))


async def retrieve_future(
    parts: WorkerParts, trainer: TrainingServer, request: Request, call: calls.RetrieveFuture
) -> Reply | Streamed:
    """Poll for a future that was not promised for a sample here."""
    parts.counters.polls += 1
    if not trainer_ids.is_wrapped(call.request_id):
        return _poll(parts, request, trainer, call)
    future = trainer_ids.unwrap_future(call.request_id, request.caller.secret)
    if future is None:
        raise NotFound("there is no such request")
    if parts.sessions.is_admitted(future.session):
        parts.sessions.note(future.session)
    with parts.dispatcher.quota.polling(request.caller):
        return await _poll_saved(parts, request, call, future)


def _poll(parts: WorkerParts, request: Request, trainer: TrainingServer, call: calls.RetrieveFuture) -> Streamed:
    """Hold a poll as long as any other and stream the result, which can be as large as what was trained on."""
    parts.dispatcher.quota.require_memory(request.caller)
    outgoing = trainer.whole(request)

    async def relay_held(send: Send) -> None:
        hold_s = parts.live.settings.poll_timeout_s
        async with while_connected(request.connection), trainer.held(hold_s, request.caller.digest) as held:
            async with trainer.exchange(outgoing) as response:
                _require_calm(response.status)
                # What has begun to arrive is sent to its end.
                trainer.release(held)
                await relay(response, trainer.headers_for_client(response), send)

    async def run(send: Send) -> None:
        try:
            with parts.dispatcher.quota.polling(request.caller):
                await relay_held(send)
        except _TROUBLE as error:
            raise _busy(parts, error) from None
        except TimeoutError:
            _require_known(parts, request)
            reply = _still_running(call)
            await send_response(send, reply.status, [(b"content-type", reply.content_type)], reply.body)

    return Streamed(run)


async def _poll_saved(
    parts: WorkerParts, request: Request, call: calls.RetrieveFuture, future: TrainerFuture
) -> Reply | Streamed:
    trainer = trainer_of(parts)
    body = wire.replaced(request.body, "request_id", future.request_id)
    try:
        hold_s = parts.live.settings.poll_timeout_s
        async with while_connected(request.connection), trainer.held(hold_s, request.caller.digest):
            async with trainer.exchange(trainer.whole(request, body)) as response:
                _require_calm(response.status)
                reply = await trainer.read(response)
                return await _learned(request, trainer, reply, future)
    except _TROUBLE as error:
        raise _busy(parts, error) from None
    except TimeoutError:
        _require_known(parts, request)
        return _still_running(call)


async def _learned(
    request: Request, trainer: TrainingServer, reply: TrainerReply, future: TrainerFuture
) -> Reply | Streamed:
    """Return the result, with an id of the gateway for a sampling session that the trainer made."""
    result = wire.saved(reply.body) if reply.status == 200 else None
    if result is None or result.sampling_session_id is None:
        return passed_back(reply)
    path = result.path or await _path_of(request, trainer, result.sampling_session_id)
    if path is None or not path.startswith("tinker://"):
        reason = "the training server does not report which weights its new sampling session samples from"
        return replies.ok(calls.failure_body(Failure(reason, Category.SERVER)))
    born = trainer_ids.born_session(future.session, result.sampling_session_id, path, request.caller.secret)
    return passed_back(reply, wire.replaced(reply.body, "sampling_session_id", born.sampling_session_id))


async def _path_of(request: Request, trainer: TrainingServer, sampler_id: str) -> str | None:
    reply = await trainer.ask(request, trainer.sampler(request, sampler_id))
    _require_calm(reply.status)
    info = wire.sampler_info(reply.body) if reply.is_success else None
    return info.model_path if info is not None else None


def _require_calm(status: int) -> None:
    """Raise `UpstreamBroke` for a 5xx: the SDK repeats a poll that gets one without any pause."""
    if status >= 500:
        raise UpstreamBroke(f"the training server answered {status}; it is asked again later")


def _require_known(parts: WorkerParts, request: Request) -> None:
    """Raise `Unauthorized` if the caller's key was revoked while its poll was held."""
    if not parts.live.keyring.knows(request.caller.digest):
        raise Unauthorized(REVOKED)


def _busy(parts: WorkerParts, error: Exception) -> Overloaded:
    parts.counters.training_failures += 1
    return Overloaded("trainer", str(error))


def _still_running(call: calls.RetrieveFuture) -> Reply:
    return replies.answer(Answer.TRY_AGAIN, calls.try_again(call.request_id, "active", None))


async def _ask(
    parts: WorkerParts, request: Request, outgoing: Outgoing, timeout_s: float | None = None
) -> TrainerReply:
    parts.counters.training_requests += 1
    trainer = trainer_of(parts)
    try:
        return await (trainer.ask(request, outgoing, timeout_s) if timeout_s else trainer.ask(request, outgoing))
    except _TROUBLE:
        parts.counters.training_failures += 1
        raise


def passed_back(reply: TrainerReply, body: bytes | None = None) -> Streamed:
    """Return the trainer's answer as the reply, with another body if one is given."""

    async def run(send: Send) -> None:
        await send_response(send, reply.status, reply.headers, reply.body if body is None else body)

    return Streamed(run)
