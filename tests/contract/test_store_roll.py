"""The roll: which owners have entered everything they run on the present server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.core.roll_call import Roll, gone_message
from shared.store.recovery import reap
from tests.contract.conftest import Heard
from tests.contract.samples import ALICE, BOB, TTL_S

if TYPE_CHECKING:
    from tests.contract.conftest import Bench


async def test_who_has_answered_is_there_until_it_leaves(bench: Bench) -> None:
    alice, bob = await bench.store(ALICE), await bench.store(BOB)
    assert await bob.read_roll() == Roll()
    run = await alice.server_run()
    assert run == await bob.server_run()
    assert await alice.answer_roll(ALICE, run)
    assert await bob.answer_roll(BOB, run)
    assert await bob.read_roll() == Roll(frozenset({ALICE, BOB}))
    await alice.leave_roll(ALICE)
    await alice.leave_roll(ALICE)
    assert await bob.read_roll() == Roll(frozenset({BOB}), frozenset({ALICE}))
    assert await alice.answer_roll(ALICE, run)
    assert await bob.read_roll() == Roll(frozenset({ALICE, BOB}))


async def test_an_answer_to_another_server_does_not_count(bench: Bench) -> None:
    store = await bench.store(ALICE)
    assert not await store.answer_roll(ALICE, b"0" * 40)
    assert await store.read_roll() == Roll()


async def test_who_is_reaped_is_struck_off_and_everybody_is_told(bench: Bench) -> None:
    heard = Heard()
    bob = await bench.store(BOB, heard)
    assert await bob.answer_roll(ALICE, await bob.server_run())
    await reap(bob, ALICE, TTL_S, bench.clock)
    assert await bob.read_roll() == Roll(gone=frozenset({ALICE}))
    await heard.until(lambda heard: gone_message(ALICE) in heard.controls)
