"""Which upstream next, and which one rests."""

from __future__ import annotations

from workers.upstreams import REFUSED_FOR_S, Upstream, all_rest, choose


class FakeAttempt:
    pass


def upstream(name: str, in_flight: int = 0) -> Upstream:
    made = Upstream(f"http://{name}")
    made.attempts.update(FakeAttempt() for _ in range(in_flight))  # type: ignore[misc]
    return made


def test_the_least_busy_one_is_chosen() -> None:
    busy, free = upstream("busy", 3), upstream("free", 1)
    assert choose([busy, free], 0.0) is free


def test_the_one_that_has_just_failed_is_avoided_if_there_is_another() -> None:
    free, busy = upstream("free"), upstream("busy", 9)
    assert choose([free, busy], 0.0, avoid=free) is busy
    assert choose([free], 0.0, avoid=free) is free


def test_a_broken_one_rests_and_comes_back() -> None:
    broken, other = upstream("broken"), upstream("other", 5)
    broken.failed(10.0)
    assert choose([broken, other], 10.5) is other
    assert choose([broken, other], 11.0) is broken


def test_rest_grows_with_failures_to_a_limit_and_ends_with_a_success() -> None:
    made, now_s, rests = upstream("u"), 0.0, []
    for _ in range(6):
        made.failed(now_s)
        rests.append(made.resting_until_s - now_s)
        now_s = made.resting_until_s
    assert rests == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    made.succeeded()
    assert not made.rests(now_s)
    assert made.failures == 0


def test_a_thousand_requests_that_fail_together_are_one_rest() -> None:
    made = upstream("u")
    for _ in range(1000):
        made.failed(5.0)
    assert made.resting_until_s == 6.0


def test_when_all_rest_the_first_to_wake_is_asked() -> None:
    late, soon, awake = upstream("late"), upstream("soon"), upstream("awake", 7)
    late.failed(2.0)
    soon.failed(1.5)
    assert all_rest([late, soon], 2.1)
    assert choose([late, soon], 2.1) is soon
    assert not all_rest([late, soon, awake], 2.1)
    assert choose([late, soon, awake], 2.1) is awake


def test_an_upstream_that_refuses_while_it_holds_requests_is_found_out() -> None:
    """D18: vLLM after SIGTERM."""
    made = upstream("u", in_flight=1)
    made.refused(100.0)
    made.refused(103.0)
    assert not made.holds_open_while_refusing(100.0 + REFUSED_FOR_S - 0.1)
    assert made.holds_open_while_refusing(100.0 + REFUSED_FOR_S)
    made.accepted()
    assert not made.holds_open_while_refusing(1000.0)
    idle = upstream("idle")
    idle.refused(0.0)
    assert not idle.holds_open_while_refusing(1000.0)


def test_a_trailing_slash_and_a_prefix_are_kept_right() -> None:
    assert str(Upstream("http://h:1/router/").completions_url) == "http://h:1/router/v1/completions"
