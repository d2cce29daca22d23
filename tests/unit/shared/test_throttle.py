"""One line in a while, and what was held back is counted."""

from __future__ import annotations

from shared.log import Throttle


def test_the_first_is_said_and_the_next_ones_are_counted() -> None:
    throttle = Throttle(30.0)
    assert throttle.allow("a", 100.0) == 0
    assert [throttle.allow("a", 100.0 + s) for s in (0.0, 1.0, 29.9)] == [None, None, None]
    assert throttle.allow("a", 130.0) == 3
    assert throttle.allow("a", 160.0) == 0


def test_subjects_do_not_silence_each_other() -> None:
    throttle = Throttle(30.0)
    assert throttle.allow("a", 0.0) == 0
    assert throttle.allow("b", 0.0) == 0
