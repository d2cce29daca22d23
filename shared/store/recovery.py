"""The time after a server was restarted, while the workers tell it again what they run.

Until then a record that is missing says nothing: the sample may be running on a worker that has not entered it again.

Ending the samples of a worker instance that is gone, and telling who waits for them.

Publishing the list of upstreams, for whoever an operator asks: a supervisor, on any host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shared.core.roll_call import gone_message
from shared.core.upstream_list import PUBLISHED, UpstreamList, next_version

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shared.clock import Clock
    from shared.store.contract import Store


# The slowest worker reconnects 0.5 s after the first one at most (link.py), later where its loop is busy, and tends to
# the store at once. How long it then enters samples, a worker reckons from its own refill (housekeeping.py): samples
# are spread evenly.
REFILL_S: Final = 1.5


def is_refilling(store: Store, clock: Clock) -> bool:
    """Whether what the store does not know may still be on its way to it."""
    restarted_s = store.restarted_s
    return restarted_s is not None and clock.monotonic_s() - restarted_s < REFILL_S


async def reap(store: Store, owner: str, ttl_s: float, clock: Clock) -> int:
    """ORPHAN everything that `owner` had open; returns how many samples that were. Raises `StoreError`.

    Several may reap at once: each sample is ended by one of them.
    """
    reaped = 0
    while keys := await store.reap(owner, ttl_s=ttl_s, now_ms=clock.wall_ms()):
        for key in keys:
            store.announce(key.session_key, key.seq_id)
        reaped += len(keys)
    await leave(store, owner)
    return reaped


async def leave(store: Store, owner: str) -> None:
    """`owner` runs nothing any more: nobody waits for it (`shared/core/roll_call.py`). Raises `StoreError`."""
    await store.leave_roll(owner)
    await store.broadcast(gone_message(owner))


async def publish_upstreams(store: Store, urls: Sequence[str], clock: Clock) -> UpstreamList:
    """Make `urls` the list of all workers of all hosts, and tell them; none at all: each host's flags count again.

    Of two that publish at once, one is the last. Raises `StoreError`.
    """
    while True:
        before = await store.read_upstreams()
        wanted = UpstreamList(next_version(before, clock.wall_ms()), tuple(urls))
        if await store.offer_upstreams(wanted) == wanted:
            await store.broadcast(PUBLISHED)
            return wanted
