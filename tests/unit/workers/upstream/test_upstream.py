"""Which upstream next, and which one rests."""

from __future__ import annotations

import math
from collections import Counter

from shared.core.upstream_protocol import UpstreamProtocol
from workers.upstream.upstream import REFUSED_FOR_S, Upstream, choose


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


def test_a_broken_one_rests_and_comes_back_when_it_answers_a_probe() -> None:
    broken, other = upstream("broken"), upstream("other", 5)
    broken.failed(10.0)
    broken.answered_probe(10.5)
    assert choose([broken, other], 10.5) is other
    assert choose([broken, other], 11.0) is other
    broken.answered_probe(11.0)
    assert choose([broken, other], 11.0) is broken
    broken.failed(11.0)
    assert broken.down_until_s == 13.0


def test_only_what_a_probe_may_tell_something_new_about_is_in_doubt() -> None:
    """Healthy traffic is a sign of life."""
    idle, busy = upstream("idle"), upstream("busy", 2)
    assert not idle.in_doubt(0.0)
    assert busy.in_doubt(0.0)
    busy.succeeded(10.0)
    assert not busy.in_doubt(13.9)
    assert busy.in_doubt(14.0)
    busy.answered_probe(14.0)
    assert not busy.in_doubt(17.9)
    busy.refused(17.9)
    assert busy.in_doubt(17.9)
    idle.failed(20.0)
    assert idle.in_doubt(20.0)


def test_rest_grows_with_failures_to_a_limit_and_ends_with_a_success() -> None:
    made, now_s, rests = upstream("u"), 0.0, []
    for _ in range(6):
        made.failed(now_s)
        rests.append(made.down_until_s - now_s)
        now_s = made.down_until_s
    assert rests == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    made.succeeded(now_s)
    assert not made.is_down(now_s)
    assert made.failures == 0


def test_a_thousand_requests_that_fail_together_are_one_rest() -> None:
    made = upstream("u")
    for _ in range(1000):
        made.failed(5.0)
    assert made.down_until_s == 6.0


def test_when_all_rest_the_first_to_wake_is_asked() -> None:
    late, soon, awake = upstream("late"), upstream("soon"), upstream("awake", 7)
    late.failed(2.0)
    soon.failed(1.5)
    assert late.is_down(2.1)
    assert soon.is_down(2.1)
    assert choose([late, soon], 2.1) is soon
    assert not awake.is_down(2.1)
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
    assert (
        str(Upstream("http://h:1/router/").samples_urls[UpstreamProtocol.COMPLETIONS])
        == "http://h:1/router/v1/completions"
    )


# -- affinity ---------------------------------------------------------------------------------------------------------


def home_of(session_key: str, upstreams: list[Upstream]) -> Upstream:
    return choose(upstreams, 0.0, session_key=session_key)


def test_a_session_has_one_home_whoever_is_asked_and_in_whatever_order() -> None:
    names = ["a:8000", "b:8000", "c:8000"]
    one, other = [upstream(name) for name in names], [upstream(name) for name in reversed(names)]
    for number in range(50):
        assert home_of(f"session-{number}", one).url == home_of(f"session-{number}", other).url


def test_sessions_spread_over_the_upstreams() -> None:
    upstreams = [upstream(f"10.0.0.{number}:8000") for number in range(8)]
    homes = Counter(home_of(f"session-{number}", upstreams).url for number in range(4000))
    assert len(homes) == 8
    assert min(homes.values()) > 400
    assert max(homes.values()) < 600


def test_an_upstream_less_moves_only_its_own_sessions() -> None:
    upstreams = [upstream(f"10.0.0.{number}:8000") for number in range(4)]
    for number in range(200):
        before = home_of(f"session-{number}", upstreams)
        if before is not upstreams[0]:
            assert home_of(f"session-{number}", upstreams[1:]) is before


def test_affinity_yields_where_its_home_is_much_busier() -> None:
    """One session with everything in it, as RL has it, uses all upstreams."""
    upstreams = [upstream(f"10.0.0.{number}:8000") for number in range(4)]
    home = home_of("rollout", upstreams)
    for number in range(1, 1001):
        home_of("rollout", upstreams).attempts.add(FakeAttempt())  # type: ignore[arg-type]
        assert home.in_flight <= math.ceil(1.25 * number / 4)
    others = [made.in_flight for made in upstreams if made is not home]
    assert home.in_flight == 313
    assert max(others) - min(others) <= 1


def test_a_session_leaves_a_home_that_rests_and_comes_back() -> None:
    upstreams = [upstream("a:8000"), upstream("b:8000")]
    home = home_of("session", upstreams)
    home.failed(0.0)
    assert home_of("session", upstreams) is not home
    home.succeeded(1.0)
    assert home_of("session", upstreams) is home
