"""The SDK's reactions, row by row as they were measured."""

from __future__ import annotations

import pytest

from gateway.bench.load.reactions import (
    ASAMPLE,
    Act,
    Reaction,
    ReplyEvent,
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

NO_REPLY = ReplyEvent(0)
BARE_400 = ReplyEvent(400, bare=True)
FATAL = Reaction(Act.FATAL)
SECOND = Reaction(Act.AGAIN, 1.0)
AT_ONCE = Reaction(Act.AGAIN)


@pytest.mark.parametrize(
    ("event", "reaction"),
    [
        (ReplyEvent(200), Reaction(Act.ACCEPT)),
        (ReplyEvent(400), FATAL),
        (BARE_400, SECOND),
        (ReplyEvent(401), FATAL),
        (ReplyEvent(402), Reaction(Act.AGAIN, 5.0)),
        (ReplyEvent(403), FATAL),
        (ReplyEvent(404), FATAL),
        (ReplyEvent(408), SECOND),
        (ReplyEvent(409), SECOND),
        (ReplyEvent(410), FATAL),
        (ReplyEvent(413), FATAL),
        (ReplyEvent(422), FATAL),
        (ReplyEvent(429), Reaction(Act.PAUSE)),
        (ReplyEvent(500), SECOND),
        (ReplyEvent(503), SECOND),
        (NO_REPLY, SECOND),
    ],
)
def test_first_reply_to_asample(event: ReplyEvent, reaction: Reaction) -> None:
    assert on_asample(event, Streak(), 0.0)[0] == reaction


def test_asample_is_tried_for_five_minutes_and_then_under_a_new_seq_id() -> None:
    """The SDK's attempts come at 0, 1, 3, 7, 15, 31, 61 ... 271, 300 s, then under a new seq_id."""
    attempts_s, streak = [0.0], Streak()
    while (step := on_asample(NO_REPLY, streak, attempts_s[-1]))[0].act is Act.AGAIN:
        attempts_s.append(attempts_s[-1] + step[0].delay_s)
        streak = step[1]
    assert step[0] == Reaction(Act.RESUBMIT)
    assert attempts_s == [0, 1, 3, 7, 15, 31, 61, 91, 121, 151, 181, 211, 241, 271, 300]


def test_backpressure_forgets_earlier_failures() -> None:
    assert on_asample(ReplyEvent(429), Streak(failures=3), 10.0)[1] == Streak()


@pytest.mark.parametrize(
    ("event", "reaction"),
    [
        (ReplyEvent(200), Reaction(Act.ACCEPT)),
        (ReplyEvent(400), AT_ONCE),
        (BARE_400, SECOND),
        (ReplyEvent(401), FATAL),
        (ReplyEvent(402), Reaction(Act.AGAIN, 5.0)),
        (ReplyEvent(403), FATAL),
        (ReplyEvent(404), FATAL),
        (ReplyEvent(408), AT_ONCE),
        (ReplyEvent(409), FATAL),
        (ReplyEvent(410), Reaction(Act.RESUBMIT)),
        (ReplyEvent(413), FATAL),
        (ReplyEvent(422), FATAL),
        (ReplyEvent(429), SECOND),
        (ReplyEvent(500), AT_ONCE),
        (ReplyEvent(503), AT_ONCE),
        (NO_REPLY, SECOND),
    ],
)
def test_first_reply_to_retrieve_future(event: ReplyEvent, reaction: Reaction) -> None:
    assert on_retrieve(event, Streak())[0] == reaction


def test_the_fourth_400_of_a_streak_is_fatal_to_a_retrieve() -> None:
    streak, acts = Streak(), []
    for event in (ReplyEvent(400), ReplyEvent(400), ReplyEvent(500), ReplyEvent(400), ReplyEvent(400)):
        reaction, streak = on_retrieve(event, streak)
        acts.append(reaction.act)
    assert acts == [Act.AGAIN] * 4 + [Act.FATAL]


def test_only_a_408_with_json_ends_a_streak_of_400s() -> None:
    three = Streak(bad_requests=3)
    assert on_retrieve(ReplyEvent(408), three)[1].bad_requests == 3
    assert on_retrieve(ReplyEvent(408, pending=True), three)[1].bad_requests == 0


def test_any_answer_but_429_resets_the_back_off_of_a_retrieve() -> None:
    late = Streak(failures=4)
    assert on_retrieve(ReplyEvent(429), late) == (Reaction(Act.AGAIN, 16.0), Streak(failures=5))
    assert on_retrieve(ReplyEvent(408), late)[1].failures == 0
    assert on_retrieve(ReplyEvent(503), late)[1].failures == 0


@pytest.mark.parametrize(
    ("event", "reaction"),
    [
        (ReplyEvent(200), Reaction(Act.ACCEPT)),
        (ReplyEvent(400), SECOND),
        (BARE_400, SECOND),
        (ReplyEvent(401), FATAL),
        (ReplyEvent(402), Reaction(Act.AGAIN, 5.0)),
        (ReplyEvent(403), FATAL),
        (ReplyEvent(404), FATAL),
        (ReplyEvent(408), SECOND),
        (ReplyEvent(409), SECOND),
        (ReplyEvent(410), FATAL),
        (ReplyEvent(413), FATAL),
        (ReplyEvent(422), FATAL),
        (ReplyEvent(429), SECOND),
        (ReplyEvent(500), SECOND),
        (NO_REPLY, SECOND),
    ],
)
def test_first_reply_to_retrieve_futures(event: ReplyEvent, reaction: Reaction) -> None:
    assert on_session_poll(event, Streak())[0] == reaction


def test_the_fourth_400_in_a_row_ends_the_session_poll() -> None:
    streak = Streak()
    for _ in range(3):
        reaction, streak = on_session_poll(ReplyEvent(400), streak)
        assert reaction == SECOND
    assert on_session_poll(ReplyEvent(400), streak)[0] == FATAL
    assert on_session_poll(ReplyEvent(500), streak)[1] == Streak()


def test_setup_is_tried_ten_times_more() -> None:
    streak, delays_s = Streak(), []
    while (step := on_setup(ReplyEvent(503), streak))[0].act is Act.AGAIN:
        delays_s.append(step[0].delay_s)
        streak = step[1]
    assert step[0] == FATAL
    assert delays_s == [0.5, 1, 2, 4, 8, 10, 10, 10, 10, 10]
    assert on_setup(ReplyEvent(404), Streak())[0] == FATAL


def test_back_off_doubles_up_to_thirty_seconds() -> None:
    assert [back_off_s(n) for n in range(7)] == [1, 2, 4, 8, 16, 30, 30]


def test_resubmission_waits_half_a_second_doubled_within_a_quarter() -> None:
    assert [resubmit_delay_s(n, 0.5) for n in (0, 1, 4, 5, 50)] == [0.5, 1, 8, 10, 10]
    assert resubmit_delay_s(0, 0.0) == 0.375
    assert resubmit_delay_s(5, 1.0) == 12.5


def test_an_exact_status_goes_before_its_class() -> None:
    assert row({"503": Row.NOW, "5xx": Row.FATAL, "other": Row.BILLING}, ReplyEvent(503)) is Row.NOW
    assert row(ASAMPLE, ReplyEvent(599)) is Row.BACK_OFF
    assert row(ASAMPLE, ReplyEvent(302)) is Row.FATAL
