"""Steps of several store calls: wait for a refill, reap a worker instance, publish the list of upstreams.

After a restart of the server the workers enter again what they run. Until they have, a missing record proves nothing:
the sample may be running on a worker that has not entered it yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shared.core.roll_call import gone_message
from shared.core.upstream_list import PUBLISHED, UpstreamList, next_version

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shared.clock import Clock
    from shared.store.contract import Store


# The slowest worker reconnects at most 0.5 s after the first one (`shared/redis/link.py`), or later if its loop is
# busy. How long it then enters samples, every worker estimates from its own refill (`workers/duties`): samples are
# spread evenly.
REFILL_S: Final = 1.5


def is_refilling(store: Store, clock: Clock) -> bool:
    """Return whether workers may still be entering samples that the store lost."""
    restarted_s = store.restarted_s
    return restarted_s is not None and clock.monotonic_s() - restarted_s < REFILL_S


async def reap(store: Store, owner: str, ttl_s: float, clock: Clock) -> int:
    """ORPHAN every open sample of `owner`, and return how many there were. Raises `StoreError`.

    Several may reap at once: one of them ends each sample.
    """
    reaped = 0
    while keys := await store.reap(owner, ttl_s=ttl_s, now_ms=clock.wall_ms()):
        for key in keys:
            store.announce(key.session_key, key.seq_id)
        reaped += len(keys)
    await leave(store, owner)
    return reaped


async def leave(store: Store, owner: str) -> None:
    """Tell all workers that `owner` runs nothing any more (`shared/core/roll_call.py`). Raises `StoreError`."""
    await store.leave_roll(owner)
    await store.broadcast(gone_message(owner))


async def publish_upstreams(store: Store, urls: Sequence[str], clock: Clock) -> UpstreamList:
    """Publish `urls` to all workers of all hosts. With no URLs each host uses its own flags again.

    If two publish at once, one of the lists is the last. Raises `StoreError`.
    """
    while True:
        before = await store.read_upstreams()
        wanted = UpstreamList(next_version(before, clock.wall_ms()), tuple(urls))
        if await store.offer_upstreams(wanted) == wanted:
            await store.broadcast(PUBLISHED)
            return wanted
