"""Bring samples into every state, for the contract suite."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.core.lifecycle import SETTLING, State
from shared.core.model import SampleKey
from shared.core.record import Claim

if TYPE_CHECKING:
    from shared.store.contract import Settled, Store

ALICE, BOB = "alice-0000000000", "bob-000000000000"
DIGEST = bytes(range(16))
KEY = SampleKey("session", 1)
NOW_MS = 1_700_000_000_000
TTL_S = 3600.0
SESSION_TTL_S = 4200.0
# seq_ids that a double would round or a Lua number cannot hold.
HUGE = [2**53 + 1, 680384511000000001, 2**63 - 1]
ENDINGS = sorted(SETTLING, key=lambda state: state.name)


def claim(owner: str = ALICE, attempt: int = 1, n: int = 2, digest: bytes = DIGEST) -> Claim:
    return Claim(owner, attempt, n, digest)


async def settle(
    store: Store, key: SampleKey, by: Claim, state: State = State.READY, payload: bytes = b"payload"
) -> Settled:
    return await store.settle(key, by, state, payload, ttl_s=TTL_S, now_ms=NOW_MS)


async def state_of(store: Store, key: SampleKey) -> State:
    header = await store.read_header(key)
    return header.state if header is not None else State.GONE


async def bring_to(store: Store, key: SampleKey, state: State) -> None:
    """Bring a sample of ALICE into this state."""
    if state is State.GONE:
        return
    assert await store.begin(key, claim()) is None
    if state is State.RETRIEVED:
        await settle(store, key, claim())
        assert await store.mark_retrieved([key], ttl_s=300) == 1
    elif state is not State.PENDING:
        await settle(store, key, claim(), state)


async def complete(store: Store, *seq_ids: int, session: str = "session", state: State = State.READY) -> None:
    for seq_id in seq_ids:
        key = SampleKey(session, seq_id)
        await store.begin(key, claim())
        await settle(store, key, claim(), state)
