"""The SDK's reactions, row by row as they were measured."""

from __future__ import annotations

import pytest

from gateway.bench.load.reactions import (
    ASAMPLE,
    Act,
    Event,
    Reaction,
    Row,
    Streak,
    back_off_s,
    on_asample,
    on_retrieve,
    on_session_poll,
    on_setup,
    resubmit_delay_s,
    row,
)

NO_REPLY = Event(0)
BARE_400 = Event(400, bare=True)
FATAL = Reaction(Act.FATAL)
SECOND = Reaction(Act.AGAIN, 1.0)
AT_ONCE = Reaction(Act.AGAIN)


@pytest.mark.parametrize(
    ("event", "reaction"),
    [
        (Event(200), Reaction(Act.ACCEPT)),
        (Event(400), FATAL),
        (BARE_400, SECOND),
        (Event(401), FATAL),
        (Event(402), Reaction(Act.AGAIN, 5.0)),
        (Event(403), FATAL),
        (Event(404), FATAL),
        (Event(408), SECOND),
        (Event(409), SECOND),
        (Event(410), FATAL),
        (Event(413), FATAL),
        (Event(422), FATAL),
        (Event(429), Reaction(Act.PAUSE)),
        (Event(500), SECOND),
        (Event(503), SECOND),
        (NO_REPLY, SECOND),
    ],
)
def test_first_reply_to_asample(event: Event, reaction: Reaction) -> None:
    assert on_asample(event, Streak(), 0.0)[0] == reaction


def test_asample_is_tried_for_five_minutes_and_then_under_a_new_seq_id() -> None:
    """The measured times of the attempts: 0, 1, 3, 7, 15, 31, 61 ... 271, 300 s, then the new seq_id."""
    attempts_s, streak = [0.0], Streak()
    while (step := on_asample(NO_REPLY, streak, attempts_s[-1]))[0].act is Act.AGAIN:
        attempts_s.append(attempts_s[-1] + step[0].delay_s)
        streak = step[1]
    assert step[0] == Reaction(Act.RESUBMIT)
    assert attempts_s == [0, 1, 3, 7, 15, 31, 61, 91, 121, 151, 181, 211, 241, 271, 300]


def test_backpressure_forgets_earlier_failures() -> None:
    assert on_asample(Event(429), Streak(failures=3), 10.0)[1] == Streak()


@pytest.mark.parametrize(
    ("event", "reaction"),
    [
        (Event(200), Reaction(Act.ACCEPT)),
        (Event(400), AT_ONCE),
        (BARE_400, SECOND),
        (Event(401), FATAL),
        (Event(402), Reaction(Act.AGAIN, 5.0)),
        (Event(403), FATAL),
        (Event(404), FATAL),
        (Event(408), AT_ONCE),
        (Event(409), FATAL),
        (Event(410), Reaction(Act.RESUBMIT)),
        (Event(413), FATAL),
        (Event(422), FATAL),
        (Event(429), SECOND),
        (Event(500), AT_ONCE),
        (Event(503), AT_ONCE),
        (NO_REPLY, SECOND),
    ],
)
def test_first_reply_to_retrieve_future(event: Event, reaction: Reaction) -> None:
    assert on_retrieve(event, Streak())[0] == reaction


def test_the_fourth_400_of_a_streak_is_fatal_to_a_retrieve() -> None:
    streak, acts = Streak(), []
    for event in (Event(400), Event(400), Event(500), Event(400), Event(400)):
        reaction, streak = on_retrieve(event, streak)
        acts.append(reaction.act)
    assert acts == [Act.AGAIN] * 4 + [Act.FATAL]


def test_only_a_408_with_json_ends_a_streak_of_400s() -> None:
    three = Streak(bad_requests=3)
    assert on_retrieve(Event(408), three)[1].bad_requests == 3
    assert on_retrieve(Event(408, pending=True), three)[1].bad_requests == 0


def test_any_answer_but_429_resets_the_back_off_of_a_retrieve() -> None:
    late = Streak(failures=4)
    assert on_retrieve(Event(429), late) == (Reaction(Act.AGAIN, 16.0), Streak(failures=5))
    assert on_retrieve(Event(408), late)[1].failures == 0
    assert on_retrieve(Event(503), late)[1].failures == 0


@pytest.mark.parametrize(
    ("event", "reaction"),
    [
        (Event(200), Reaction(Act.ACCEPT)),
        (Event(400), SECOND),
        (BARE_400, SECOND),
        (Event(401), FATAL),
        (Event(402), Reaction(Act.AGAIN, 5.0)),
        (Event(403), FATAL),
        (Event(404), FATAL),
        (Event(408), SECOND),
        (Event(409), SECOND),
        (Event(410), FATAL),
        (Event(413), FATAL),
        (Event(422), FATAL),
        (Event(429), SECOND),
        (Event(500), SECOND),
        (NO_REPLY, SECOND),
    ],
)
def test_first_reply_to_retrieve_futures(event: Event, reaction: Reaction) -> None:
    assert on_session_poll(event, Streak())[0] == reaction


def test_the_fourth_400_in_a_row_ends_the_session_poll() -> None:
    streak = Streak()
    for _ in range(3):
        reaction, streak = on_session_poll(Event(400), streak)
        assert reaction == SECOND
    assert on_session_poll(Event(400), streak)[0] == FATAL
    assert on_session_poll(Event(500), streak)[1] == Streak()


def test_setup_is_tried_ten_times_more() -> None:
    streak, delays_s = Streak(), []
    while (step := on_setup(Event(503), streak))[0].act is Act.AGAIN:
        delays_s.append(step[0].delay_s)
        streak = step[1]
    assert step[0] == FATAL
    assert delays_s == [0.5, 1, 2, 4, 8, 10, 10, 10, 10, 10]
    assert on_setup(Event(404), Streak())[0] == FATAL


def test_back_off_doubles_up_to_thirty_seconds() -> None:
    assert [back_off_s(n) for n in range(7)] == [1, 2, 4, 8, 16, 30, 30]


def test_resubmission_waits_half_a_second_doubled_within_a_quarter() -> None:
    assert [resubmit_delay_s(n, 0.5) for n in (0, 1, 4, 5, 50)] == [0.5, 1, 8, 10, 10]
    assert resubmit_delay_s(0, 0.0) == 0.375
    assert resubmit_delay_s(5, 1.0) == 12.5


def test_an_exact_status_goes_before_its_class() -> None:
    assert row({"503": Row.NOW, "5xx": Row.FATAL, "other": Row.BILLING}, Event(503)) is Row.NOW
    assert row(ASAMPLE, Event(599)) is Row.BACK_OFF
    assert row(ASAMPLE, Event(302)) is Row.FATAL
