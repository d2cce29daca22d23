"""Every store executes the table of `shared/core/lifecycle.py`: with another table it takes other steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shared.core.lifecycle import SETTLING, TRANSITIONS, Event, State, after
from tests.contract.samples import ALICE, KEY, NOW_MS, TTL_S, bring_to, claim, settle, state_of

if TYPE_CHECKING:
    from shared.core.lifecycle import Transitions
    from shared.store.contract import Store
    from tests.contract.conftest import Bench

ENDINGS = {event: state for state, event in SETTLING.items()}
# EXPIRE has no script: Redis carries it out when a record's time to live ends.
ROWS = [row for row in TRANSITIONS if row[1] is not Event.EXPIRE]
ADDED: list[tuple[tuple[State, Event], State]] = [
    ((State.STALE, Event.BEGIN), State.PENDING),
    ((State.ORPHANED, Event.SETTLE_READY), State.READY),
    ((State.READY, Event.CANCEL), State.CANCELLED),
    ((State.FAILED, Event.HANDED_OVER), State.RETRIEVED),
]


async def take_step(store: Store, event: Event) -> None:
    match event:
        case Event.BEGIN:
            await store.begin(KEY, claim())
        case Event.HANDED_OVER:
            await store.mark_retrieved([KEY], ttl_s=TTL_S)
        case _:
            await settle(store, KEY, claim(), ENDINGS[event])


async def check_step(bench: Bench, row: tuple[State, Event], transitions: Transitions) -> None:
    """Bring a sample to the row's state by the real table; then take its step by `transitions`."""
    await bring_to(await bench.store(ALICE), KEY, row[0])
    store = await bench.store(ALICE, transitions=transitions)
    await take_step(store, row[1])
    assert await state_of(store, KEY) is after(*row, transitions)


@pytest.mark.parametrize("row", ROWS)
async def test_a_step_that_the_table_loses_is_no_longer_taken(bench: Bench, row: tuple[State, Event]) -> None:
    await check_step(bench, row, {kept: state for kept, state in TRANSITIONS.items() if kept != row})


@pytest.mark.parametrize(("row", "state"), ADDED)
async def test_a_step_that_the_table_gains_is_taken(bench: Bench, row: tuple[State, Event], state: State) -> None:
    await check_step(bench, row, {**TRANSITIONS, row: state})


async def test_the_reaper_asks_the_table_too(bench: Bench) -> None:
    await bring_to(await bench.store(ALICE), KEY, State.PENDING)
    row = (State.PENDING, Event.ORPHAN)
    store = await bench.store(ALICE, transitions={kept: state for kept, state in TRANSITIONS.items() if kept != row})
    assert await store.reap(ALICE, ttl_s=TTL_S, now_ms=NOW_MS) == []
    assert await state_of(store, KEY) is State.PENDING
