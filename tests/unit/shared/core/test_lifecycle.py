"""The table of a sample's life: its rows, and that no other step exists."""

from __future__ import annotations

import itertools

import pytest

from shared.core.lifecycle import ANSWERS, SETTLED, SETTLING, TRANSITIONS, Answer, Event, State, after, allows

EVERY_STEP = list(itertools.product(State, Event))


@pytest.mark.parametrize(("state", "event"), EVERY_STEP)
def test_illegal_steps_change_nothing(state: State, event: Event) -> None:
    if (state, event) not in TRANSITIONS:
        assert after(state, event) is state
        assert not allows(state, event)


@pytest.mark.parametrize(
    ("state", "event"), list(itertools.product(sorted(SETTLED, key=lambda state: state.name), SETTLING.values()))
)
def test_the_first_terminal_state_wins(state: State, event: Event) -> None:
    assert after(state, event) is state


def test_pending_never_expires() -> None:
    assert after(State.PENDING, Event.EXPIRE) is State.PENDING


def test_every_settled_state_is_reached_from_pending_and_expires() -> None:
    for state, event in SETTLING.items():
        assert after(State.PENDING, event) is state
        assert after(state, Event.EXPIRE) is State.GONE
    assert set(SETTLING) | {State.RETRIEVED} == SETTLED


def test_every_state_has_an_answer() -> None:
    assert set(ANSWERS) == set(State)


def test_only_a_result_and_a_failure_end_the_users_call() -> None:
    """The SDK submits a lost sample again, so that a training run does not die of it."""
    final = {state for state, answer in ANSWERS.items() if answer in (Answer.RESULT, Answer.FAILURE)}
    assert final == {State.READY, State.RETRIEVED, State.FAILED, State.CANCELLED}


def test_states_are_one_byte_each() -> None:
    stored = [state.value for state in State if state is not State.GONE]
    assert len(set(stored)) == len(stored)
    assert all(len(value.encode()) == 1 for value in stored)
