"""Ending the samples of a worker instance that is gone, and telling who waits for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.core.roll_call import gone_message

if TYPE_CHECKING:
    from shared.clock import Clock
    from shared.store.base import Store


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
