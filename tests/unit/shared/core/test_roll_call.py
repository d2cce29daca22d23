"""Which workers are awaited after a store lost data, and for how long."""

from __future__ import annotations

import pytest

from shared.core.roll_call import Roll, RollCall

LEASE_S = 15.0


@pytest.fixture
def roll() -> RollCall:
    """Return the roll call of `me`, who knows `a` and `b`."""
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
    """It was emptied between two commands: owners that it does not name are not gone."""
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


ALL = Roll(frozenset({"me", "a", "b"}))
SOME = Roll(frozenset({"me", "b"}))


def test_a_look_has_nothing_to_say_while_nothing_was_lost(roll: RollCall) -> None:
    assert roll.look(ALL, 1.0) is None


def test_who_entered_all_waits_for_those_known_by_name_as_long_as_they_may_take(roll: RollCall) -> None:
    roll.begin(100.0)
    assert roll.entered_all(101.0, unnamed_need_s=2.0) == LEASE_S - 1.0
    assert roll.look(SOME, 104.0) == LEASE_S - 4.0


def test_who_entered_all_gives_the_others_at_least_as_long_as_it_took(roll: RollCall) -> None:
    roll.begin(100.0)
    assert roll.entered_all(100.0 + LEASE_S - 1.0, unnamed_need_s=2.0) == 2.0
    assert roll.entered_all(200.0, unnamed_need_s=2.0) == 2.0, "a lease after the loss nobody is waited for by name"


def test_once_all_known_by_name_have_told_the_rest_of_the_others_time_is_left(roll: RollCall) -> None:
    """It is returned once, so that it does not override what another worker reported since."""
    roll.begin(100.0)
    roll.entered_all(101.0, unnamed_need_s=2.0)
    assert roll.look(SOME, 101.5) == LEASE_S - 1.5
    assert roll.look(ALL, 102.0) == 1.0
    assert roll.look(ALL, 102.5) is None


@pytest.mark.parametrize("looked_s", [103.0, 110.0])
def test_nothing_is_left_when_the_others_time_is_over_before_those_known_by_name_have_told(
    roll: RollCall, looked_s: float
) -> None:
    roll.begin(100.0)
    roll.entered_all(101.0, unnamed_need_s=2.0)
    left_s = roll.look(ALL, looked_s)
    assert left_s is not None
    assert left_s <= 0.0


def test_a_second_loss_makes_a_look_tell_again(roll: RollCall) -> None:
    roll.begin(100.0)
    roll.entered_all(101.0, unnamed_need_s=2.0)
    assert roll.look(ALL, 102.0) == 1.0
    roll.begin(110.0)
    roll.entered_all(110.5, unnamed_need_s=4.0)
    assert roll.look(ALL, 111.0) == 3.5


def test_a_look_at_a_server_that_does_not_know_the_one_who_looks_waits_on(roll: RollCall) -> None:
    roll.begin(100.0)
    roll.entered_all(101.0, unnamed_need_s=2.0)
    assert roll.look(Roll(frozenset({"a", "b"})), 103.0) == LEASE_S - 3.0


def test_telling_again_without_a_loss_does_not_make_a_look_tell(roll: RollCall) -> None:
    """A worker that was struck off answers again; the others have nothing to enter."""
    assert roll.entered_all(50.0, unnamed_need_s=2.0) == 2.0
    assert roll.look(ALL, 51.0) is None
