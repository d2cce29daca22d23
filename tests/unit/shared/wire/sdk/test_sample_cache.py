from __future__ import annotations

from shared.wire.sdk.sample_cache import Recent


def test_what_was_put_is_found() -> None:
    recent: Recent[str, int] = Recent(2)
    assert recent.get("a") is None
    recent.put("a", 1)
    assert recent.get("a") == 1


def test_it_holds_twice_as_many_at_most() -> None:
    recent: Recent[int, int] = Recent(3)
    for number in range(100):
        recent.put(number, number)
        assert len(recent) <= 6
    assert [recent.get(number) for number in range(97, 100)] == [97, 98, 99]
    assert recent.get(0) is None


def test_what_is_asked_for_stays_whatever_else_comes() -> None:
    recent: Recent[int, str] = Recent(3)
    recent.put(-1, "kept")
    for number in range(100):
        recent.put(number, "other")
        if number % 2:
            assert recent.get(-1) == "kept"
