"""The queue of deadlines, and the sweep over it."""

from __future__ import annotations

from shared.loop.watchlist import Watchlist


def test_overdue_longest_first_and_only_once() -> None:
    waiting: Watchlist[str] = Watchlist(10.0)
    for now_s, item in ((0.0, "a"), (1.0, "b"), (5.0, "c")):
        waiting.add(item, now_s)
    assert waiting.take_overdue(9.9, 10) == []
    assert waiting.take_overdue(11.0, 10) == ["a", "b"]
    assert waiting.take_overdue(11.0, 10) == []
    assert len(waiting) == 1 and "c" in waiting


def test_adding_again_starts_the_patience_again() -> None:
    waiting: Watchlist[str] = Watchlist(10.0)
    waiting.add("a", 0.0)
    waiting.add("b", 1.0)
    waiting.add("a", 9.0)
    assert waiting.take_overdue(11.0, 10) == ["b"]
    assert waiting.take_overdue(19.0, 10) == ["a"]


def test_no_more_than_asked_for() -> None:
    waiting: Watchlist[int] = Watchlist(1.0)
    for item in range(5):
        waiting.add(item, 0.0)
    assert waiting.take_overdue(2.0, 2) == [0, 1]
    assert waiting.take_overdue(2.0, 10) == [2, 3, 4]


def test_discarding_what_is_not_there() -> None:
    waiting: Watchlist[str] = Watchlist(1.0)
    waiting.add("a", 0.0)
    waiting.discard("a")
    waiting.discard("a")
    assert not len(waiting) and waiting.take_overdue(5.0, 1) == []
