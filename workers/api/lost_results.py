"""Decide what is gone for good and what a store that lost its data will get back, for polls that find no record.

A client whose poll gets "gone" submits the sample again. After a loss of data that would waste one execution for each
sample that still runs somewhere. So a poll that finds a record missing first checks whether this worker's own lease is
missing too, which a live worker loses only together with everything else, and whether anybody refills the store. This
costs commands only where a record is missing.

A session poll also needs the samples that nobody remembers. After a loss every worker writes into the store again what
it runs and what it had settled. A worker that died at the same moment writes nothing, and a client on the session poll
would wait for its samples forever, since it fetches only what is named to it. But a client numbers its samples
consecutively and spreads them over all workers: what is missing between the known numbers, and close to them, was lost,
or was fetched long ago.

A needless name is harmless: a client ignores what it does not wait for, and finds out about the rest when it fetches
it. So this is generous, once per client and lost log.
"""

from __future__ import annotations

import asyncio
from itertools import chain
from typing import TYPE_CHECKING, Final

from shared.core.model import CLONE_SPAN
from shared.loop.slices import batches, in_turns
from shared.store.contract import LogEntry, LogPage
from shared.store.recovery import REFILL_S

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from shared.core.model import SamplingSession
    from workers.parts import WorkerParts


async def may_come_back(parts: WorkerParts) -> bool:
    """Return whether a missing record may still be on its way into the store. Raises `StoreError`."""
    dispatcher = parts.dispatcher
    if dispatcher.is_refilling(parts.clock.monotonic_s()):
        return True
    lease = await parts.store.watch_lease(dispatcher.owner)
    if not lease.held:
        dispatcher.on_loss()
        return True
    # A worker that was started after a restart has nothing to compare with: others may not be back yet.
    return lease.server_age_s < REFILL_S or await parts.store.refill_left_s() > 0


# As many below the lowest known number as there are up to the highest: a dead worker's samples are as old as others'.
# Bounded by what one worker may run; an entry is 130 bytes to the client.
_BELOW_MOST: Final = 65_536
# The last few numbers of all may be the dead worker's. One not in use yet makes the client fetch early, no more.
_AHEAD: Final = 64
_AT_ONCE: Final = 200
# Keys that are compared in one turn of the loop: a millisecond.
_COMPARED_AT_ONCE: Final = 5_000
_EPOCH_BITS: Final = 32


def began_anew(prev_cursor: int, page: LogPage) -> bool:
    """Return whether the client was reading another log than that of this page."""
    return prev_cursor > 0 and prev_cursor >> _EPOCH_BITS != page.cursor >> _EPOCH_BITS


def doubtful(known: Collection[int]) -> Iterator[int]:
    """Yield the seq_ids that may have been in use beside `known`; all are of one clone."""
    if not known:
        return
    lowest, highest = min(known), max(known)
    below = min(highest - lowest, _BELOW_MOST)
    first = max(lowest - below, lowest // CLONE_SPAN * CLONE_SPAN)
    # A long-lived client that left one old sample behind is no reason to go through all since.
    first = max(first, highest - 2 * _BELOW_MOST)
    for seq_id in range(first, highest + _AHEAD + 1):
        if seq_id not in known:
            yield seq_id


async def with_lost(parts: WorkerParts, session: SamplingSession, clone_id: int, page: LogPage) -> LogPage:
    """Add to `page`, as failed, what the store does not know. Raises `StoreError`."""
    known = {entry.seq_id for entry in page.entries} | await _remembered(parts, session.session_key, clone_id)
    lost: list[LogEntry] = []
    for batch in batches(doubtful(known), _AT_ONCE):
        found = await asyncio.gather(*(parts.store.read_header(session.key(seq_id)) for seq_id in batch))
        lost += [LogEntry(seq_id, False, 0) for seq_id, header in zip(batch, found, strict=True) if header is None]
    return LogPage([*page.entries, *lost], page.cursor)


async def _remembered(parts: WorkerParts, session_key: str, clone_id: int) -> set[int]:
    """Return the seq_ids of the client's samples that this worker runs or has settled."""
    running = list(parts.dispatcher.samples)
    settled = parts.unfetched.keys()
    known: set[int] = set()
    async for keys in in_turns(chain(running, settled), _COMPARED_AT_ONCE):
        known |= {key.seq_id for key in keys if key.session_key == session_key and key.clone_id == clone_id}
    return known
