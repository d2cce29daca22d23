"""Who is waited for when a store has lost data, and for how long."""

from __future__ import annotations

import pytest

from shared.core.roll_call import Roll, RollCall

LEASE_S = 15.0


@pytest.fixture
def roll() -> RollCall:
    """Of `me`, who knows `a` and `b`."""
    made = RollCall("me", LEASE_S)
    made.look(Roll(frozenset({"me", "a", "b"})), 0.0)
    return made


def test_nobody_is_awaited_while_nothing_was_lost(roll: RollCall) -> None:
    assert not roll.awaited
    assert roll.left_s(1.0) == 0.0


def test_those_that_were_there_are_awaited_until_each_has_answered(roll: RollCall) -> None:
    roll.begin(100.0)
    assert roll.awaited == {"a", "b"}
    roll.look(Roll(frozenset({"me", "b"})), 101.0)
    assert roll.awaited == {"a"}
    assert roll.left_s(101.0) == LEASE_S - 1.0
    roll.look(Roll(frozenset({"me", "a", "b"})), 102.0)
    assert not roll.awaited
    assert roll.left_s(102.0) == 0.0


def test_nobody_is_awaited_for_longer_than_a_lease_or_ever_again(roll: RollCall) -> None:
    roll.begin(100.0)
    roll.look(Roll(frozenset({"me", "b"})), 100.0 + LEASE_S)
    assert not roll.awaited
    roll.begin(200.0)
    assert roll.awaited == {"b"}


def test_who_is_gone_is_not_awaited(roll: RollCall) -> None:
    roll.is_gone("a")
    roll.begin(100.0)
    assert roll.awaited == {"b"}
    roll.is_gone("b")
    assert not roll.awaited


def test_who_died_while_nobody_could_be_told_is_not_awaited(roll: RollCall) -> None:
    roll.begin(100.0)
    roll.look(Roll(frozenset({"me", "b"}), frozenset({"a"})), 101.0)
    assert not roll.awaited


def test_who_came_since_the_last_look_is_awaited(roll: RollCall) -> None:
    roll.is_there("c")
    roll.is_there("me")
    roll.begin(100.0)
    assert roll.awaited == {"a", "b", "c"}


def test_a_server_that_does_not_know_the_one_who_looks_has_no_word_of_the_others(roll: RollCall) -> None:
    """It was emptied between two commands: those it does not name are not gone."""
    roll.look(Roll(frozenset()), 1.0)
    roll.begin(2.0)
    roll.look(Roll(frozenset({"a"})), 3.0)
    assert roll.awaited == {"a", "b"}


def test_a_second_loss_awaits_all_of_them_again_for_a_whole_lease(roll: RollCall) -> None:
    roll.begin(100.0)
    roll.look(Roll(frozenset({"me", "a"})), 101.0)
    roll.begin(110.0)
    assert roll.awaited == {"a", "b"}
    assert roll.left_s(110.0) == LEASE_S
