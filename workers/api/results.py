"""Deliver results: one long poll per sample, one per sampling session, and cancelling.

Rules that the SDK forces (docs/wire.md): a pending retrieve is held, then 408; trouble with the store is a held poll
too, because the SDK repeats 408 and 5xx without any pause; a session poll never answers 4xx to a well-formed request,
since that ends the client for good; a poll for what is not the caller's is held like one without news. Only a 429 is
never fatal: a key gets it that has more polls than its samples need, or too many bytes unread.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Final

from shared.core import ids, trainer_ids
from shared.core.callers import REVOKED
from shared.core.errors import NotFound, StoreError, StoreUnavailable, Unauthorized
from shared.core.lifecycle import ANSWERS, Answer, State
from shared.core.record import BadRecord
from shared.store.contract import LogPage
from shared.wire.sdk import calls, result
from workers.api import lost_results, replies, training
from workers.api.lost_results import may_come_back
from workers.api.replies import PROTOBUF, Reply, Streamed
from workers.samples.messages import cancel_message
from workers.samples.waiters import Wake

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from shared.core.callers import Caller
    from shared.core.model import SampleKey, SamplingSession
    from shared.core.record import Record
    from shared.http.request import Request
    from workers.parts import WorkerParts
    from workers.samples.waiters import Waiter

log = logging.getLogger(__name__)

# wire.md: below this a size announcement costs the client a round trip and saves nothing.
_METADATA_ABOVE_BYTES: Final = 64 * 1024
# Acknowledgements in one step: some 3 ms.
_ACKNOWLEDGED_AT_ONCE: Final = 1_000
# Completions in one reply to a session poll: 130 bytes each.
_PAGE: Final = 5_000
_NO_UPSTREAM: Final = "no upstream takes the sample at the moment; it is tried again"
_STORE_AWAY: Final = "the result store does not answer at the moment"
# How long a held poll waits before it asks a store again that did not answer.
_STORE_RETRY_S: Final = 1.0
# What unknown sessions wait under: no session's key, so that nothing that happens elsewhere wakes them.
_NO_SESSION: Final = ""


async def retrieve_future(parts: WorkerParts, request: Request) -> Reply | Streamed:
    """Hold until the sample has settled; its result, its failure, "submit again", or "try again"."""
    call = calls.decode_retrieve_future(request.body)
    if parts.trainer is not None and not trainer_ids.is_of_sample(call.request_id):
        return await training.retrieve_future(parts, parts.trainer, request, call)
    session, key = _find(parts, call.request_id, request.caller)
    parts.counters.polls += 1
    if not ids.is_lone(session.session_id):
        parts.sessions.note(session.session_id)
    with parts.dispatcher.quota.polling(request.caller):
        outcome = await _await_record(parts, request, key)
    if outcome is Wake.REVOKED:
        raise Unauthorized(REVOKED)
    if isinstance(outcome, Wake):
        return await _try_again(parts, call.request_id, key, outcome)
    return _reply_for(parts, request, call, key, outcome)


def _find(parts: WorkerParts, request_id: str, caller: Caller) -> tuple[SamplingSession, SampleKey]:
    """Return the session and key of a request id. Raises `NotFound` if it is malformed or not the caller's."""
    ident = ids.split_request_id(request_id)
    session = parts.sessions.find(ident[0], caller) if ident is not None else None
    if ident is None or session is None:
        raise NotFound("there is no such request")
    return session, session.key(ident[1])


async def _await_record(parts: WorkerParts, request: Request, key: SampleKey) -> Record | Wake | None:
    """Return the settled record, None if there is no record at all, or why the poll ends without one."""
    just_settled = parts.waiters.just_settled.take(key, parts.clock.monotonic_s())
    if just_settled is not None:
        return just_settled
    waiter = parts.waiters.sample_waiter(key, parts.live.settings.poll_timeout_s, request.caller.digest)
    client_gone = waiter.client_gone
    request.connection.add_lost_callback(client_gone)
    watched = False
    try:
        while True:
            if key not in parts.dispatcher.samples:
                if not watched:
                    watched = await _watch(parts, key.session_key, waiter)
                record = await _look(parts, key, waiter)
                if not isinstance(record, Wake):
                    return record
            woken = await waiter.woken
            # One announcement may wake thousands.
            if not parts.turns.try_take():
                await parts.turns.wait(request.caller.digest)
            if not isinstance(woken, Wake):
                return woken
            if waiter.ended is not None:
                return waiter.ended
            waiter.rearm()
    finally:
        request.connection.remove_lost_callback(client_gone)
        parts.waiters.forget_sample(key, waiter)
        if watched:
            parts.store.unwatch(key.session_key)


async def _watch(parts: WorkerParts, session_key: str, waiter: Waiter) -> bool:
    """Have announcements sent here before looking, so that nothing settles unseen in between."""
    try:
        await parts.store.watch(session_key)
    except StoreError:
        waiter.wake_in(_STORE_RETRY_S)
        return False
    return True


async def _look(parts: WorkerParts, key: SampleKey, waiter: Waiter) -> Record | Wake | None:
    """Return the record if it is settled, None if it is missing, or `Wake.LOOK` to look again later."""
    try:
        record = await parts.store.read(key)
        wait = record is None and await may_come_back(parts)
    except BadRecord as error:
        # It will not become readable: the client submits the sample again.
        _log_unreadable(parts, "a stored sample", str(error))
        return None
    except StoreError:
        wait = True
    if wait:
        waiter.wake_in(_STORE_RETRY_S)
        return Wake.LOOK
    return Wake.LOOK if record is not None and record.header.state is State.PENDING else record


def _log_unreadable(parts: WorkerParts, what: str, error: str) -> None:
    not_logged = parts.unreadable_logs.allow(what, parts.clock.monotonic_s())
    if not_logged is not None:
        log.error("Redis holds what no gateway wrote", extra={"what": what, "error": error, "not_logged": not_logged})


async def _try_again(parts: WorkerParts, request_id: str, key: SampleKey, why: Wake) -> Reply:
    if why is Wake.CLIENT_GONE:
        parts.counters.polls_abandoned += 1
        return replies.answer(Answer.TRY_AGAIN, calls.try_again(request_id, "active", None))
    reason = await _paused_reason(parts, key)
    state = "active" if reason is None else "paused_capacity"
    return replies.answer(Answer.TRY_AGAIN, calls.try_again(request_id, state, reason))


async def _paused_reason(parts: WorkerParts, key: SampleKey) -> str | None:
    """Return why the sample waits if no upstream takes it. The worker that runs it knows; others see its mark."""
    sample = parts.dispatcher.samples.get(key)
    if sample is not None:
        return sample.paused_reason
    try:
        header = await parts.store.read_header(key)
    except StoreError:
        return _STORE_AWAY
    return _NO_UPSTREAM if header is not None and header.paused else None


def _reply_for(
    parts: WorkerParts, request: Request, call: calls.RetrieveFuture, key: SampleKey, record: Record | None
) -> Reply:
    state = record.header.state if record is not None else State.GONE
    kind = ANSWERS[state]
    if record is None or kind is Answer.RESUBMIT:
        return replies.answer(kind, calls.error_body(_WHY_GONE[state]))
    delivered = partial(parts.expiry.handed_over, key)
    if kind is Answer.FAILURE:
        return Reply(replies.STATUS_OF_ANSWER[kind], bytes(record.payload), on_delivered=delivered)
    if call.allow_metadata_only and len(record.payload) > _METADATA_ABOVE_BYTES:
        return replies.ok(calls.complete_metadata(len(record.payload)))
    if calls.prefers_protobuf(request.accept):
        return Reply(replies.STATUS_OF_ANSWER[kind], record.payload, PROTOBUF, delivered)
    body = result.sample_response_json(record.payload)
    return Reply(replies.STATUS_OF_ANSWER[kind], body, on_delivered=delivered)


_WHY_GONE: Final = {
    State.STALE: "the session of this sample had ended; submit it again",
    State.ORPHANED: "the sample was interrupted; submit it again",
    State.GONE: "the result is no longer kept; submit the sample again",
}


async def retrieve_futures(parts: WorkerParts, request: Request) -> Reply:
    """Hold until something completed in this (sampling session, clone) after the cursor; take acknowledgements."""
    call = await parts.long_work.run(calls.retrieve_futures_steps(request.body), request.caller.digest)
    parts.counters.session_polls += 1
    hold_s = _hold_s(parts, call.timeout)
    session = parts.sessions.find(call.sampling_session_id, request.caller)
    if session is None:
        with parts.dispatcher.quota.polling(request.caller):
            await _hold(parts, request, hold_s)
        return replies.ok(calls.completions((), call.prev_cursor))
    if not ids.is_lone(session.session_id):
        parts.sessions.note(session.session_id)
    await parts.long_work.run(_acknowledge(parts, session, call.retrieved_request_ids), request.caller.digest)
    # SDK 0.36 sends its last acknowledgements in a full long poll with nothing pending: it must not be held.
    with parts.dispatcher.quota.polling(request.caller):
        page = await _await_page(parts, request, session, call, 0.0 if call.retrieved_request_ids else hold_s)
    entries = ((ids.request_id(session, entry.seq_id), entry.finished, entry.size_bytes) for entry in page.entries)
    return replies.ok(calls.completions(entries, page.cursor))


def _hold_s(parts: WorkerParts, asked_s: float | None) -> float:
    longest_s = parts.live.settings.poll_timeout_s
    return longest_s if asked_s is None else min(max(asked_s, 0.0), longest_s)


def _acknowledge(
    parts: WorkerParts, session: SamplingSession, request_ids: Sequence[str]
) -> Generator[None, None, None]:
    """Take note of the samples of this very session among what the client has."""
    for start in range(0, len(request_ids), _ACKNOWLEDGED_AT_ONCE):
        if start:
            yield
        found = map(ids.split_request_id, request_ids[start : start + _ACKNOWLEDGED_AT_ONCE])
        own = [part[1] for part in found if part is not None and part[0] == session.sampling_session_id]
        parts.expiry.acknowledged([session.key(seq_id) for seq_id in own])


async def _await_page(
    parts: WorkerParts, request: Request, session: SamplingSession, call: calls.RetrieveFutures, hold_s: float
) -> LogPage:
    """Return what is new, or an empty page with the same cursor."""
    session_key = session.session_key
    waiter = parts.waiters.log_waiter(session_key, hold_s, request.caller.digest)
    request.connection.add_lost_callback(waiter.client_gone)
    page = LogPage([], call.prev_cursor)
    watched = False
    try:
        while True:
            try:
                if hold_s and not watched:
                    await parts.store.watch(session_key)
                    watched = True
                page = await _read_page(parts, session, call)
            except StoreError:
                waiter.wake_in(_STORE_RETRY_S)
            if page.entries or (hold_s == 0.0 and waiter.ended is None):
                return page
            await waiter.woken
            if waiter.ended is Wake.REVOKED:
                raise Unauthorized(REVOKED)
            if waiter.ended is not None:
                return page
            waiter.rearm()
    finally:
        request.connection.remove_lost_callback(waiter.client_gone)
        parts.waiters.forget_log(session_key, waiter)
        if watched:
            parts.store.unwatch(session_key)


async def _read_page(parts: WorkerParts, session: SamplingSession, call: calls.RetrieveFutures) -> LogPage:
    """Read the log after the cursor; if it is another log than before, add what may have been lost with that.

    Raises `StoreError`, also while it is not yet known what is lost.
    """
    clone_id = call.cloned_sampler_id
    page = await parts.store.read_log(session.session_key, clone_id, call.prev_cursor, limit=_PAGE)
    if page.unreadable:
        _log_unreadable(parts, "lines of a completion log", f"{page.unreadable} lines")
    if not lost_results.began_anew(call.prev_cursor, page):
        return page
    if await may_come_back(parts):
        raise StoreUnavailable("the store is being refilled", maybe_done=False)
    return await lost_results.with_lost(parts, session, clone_id, page)


async def _hold(parts: WorkerParts, request: Request, hold_s: float) -> None:
    """Answer an unknown session no faster than an idle one: its client asks again at once."""
    waiter = parts.waiters.log_waiter(_NO_SESSION, hold_s, request.caller.digest)
    request.connection.add_lost_callback(waiter.client_gone)
    try:
        if await waiter.woken is Wake.REVOKED:
            raise Unauthorized(REVOKED)
    finally:
        request.connection.remove_lost_callback(waiter.client_gone)
        parts.waiters.forget_log(_NO_SESSION, waiter)


async def cancel_future(parts: WorkerParts, request: Request) -> Reply:
    """End a sample that nobody wants any more, wherever it runs."""
    call = calls.decode_cancel_future(request.body)
    _, key = _find(parts, call.request_id, request.caller)
    if not parts.dispatcher.cancel(key):
        header = await parts.store.read_header(key)
        if header is not None and header.state is State.PENDING:
            await parts.store.send_control(header.claim.owner, cancel_message(key))
    return replies.ok()
