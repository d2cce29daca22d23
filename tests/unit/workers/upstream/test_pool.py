"""What the upstreams serve, asked for as often as needed and no oftener; which of them rests."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from shared.clock import ManualClock
from shared.config import ModelName
from shared.core.errors import NotFound, Overloaded
from shared.core.faults import BreakKind, Fault, FaultClass, classify_break
from shared.core.model import ModelRef
from tests.waiting import until
from workers.upstream.catalogue import Catalogue
from workers.upstream.pool import UpstreamPool
from workers.upstream.upstream import REFUSED_FOR_S

if TYPE_CHECKING:
    from workers.upstream.upstream import Upstream

REFUSED = classify_break(BreakKind.CONNECT_REFUSED, "http://a")
BUSY = Fault(FaultClass.NEVER_EXECUTED, "upstream answered 503: busy")
BASE = ModelRef(base_model="org/base")
ADAPTER = ModelRef(model_path="tinker://run-1/sampler_weights/1")


def listing(*names: str) -> bytes:
    return json.dumps({"data": [{"id": name, "max_model_len": 64} for name in names]}).encode()


class FakeForwarder:
    """Upstreams that answer, or refuse, what they were told to; with a gate they answer when it opens."""

    def __init__(self) -> None:
        self.replies: dict[str, bytes | Fault] = {}
        self.asked: list[str] = []
        self.gate: asyncio.Event | None = None
        self.clock = ManualClock()

    async def get(self, upstream: Upstream, url: object, timeout_s: float) -> bytes | Fault:
        self.asked.append(upstream.url)
        if self.gate is not None:
            await self.gate.wait()
        reply = self.replies.get(upstream.url, REFUSED)
        if reply is REFUSED:
            upstream.refused(self.clock.monotonic_s())
        else:
            upstream.accepted()
        return reply


class Broken:
    """An exchange under way that remembers how it was ended."""

    def __init__(self) -> None:
        self.kind: BreakKind | None = None

    def break_off(self, kind: BreakKind) -> None:
        self.kind = kind


class Bench:
    def __init__(self, *urls: str, offered: tuple[ModelName, ...] = ()) -> None:
        self.forwarder = FakeForwarder()
        self.clock = self.forwarder.clock
        catalogue = Catalogue(offered, "{run_id}")
        self.slept_s: list[float] = []
        self.pool = UpstreamPool(
            urls or ("http://a",),
            self.forwarder,  # type: ignore[arg-type] # all that is asked of it is `get`
            catalogue,
            self.clock,
            self._sleep,
        )

    async def _sleep(self, delay_s: float) -> None:
        self.slept_s.append(delay_s)
        await asyncio.sleep(0)
        self.clock.advance(delay_s)

    def serve(self, *names: str, url: str = "http://a") -> None:
        self.forwarder.replies[url] = listing(*names)

    def open_exchange(self) -> Broken:
        made = Broken()
        self.pool.choose("org/base").attempts.add(made)  # type: ignore[arg-type] # as far as a pool knows an attempt
        return made


@pytest.fixture
def bench() -> Bench:
    return Bench()


# -- models -----------------------------------------------------------------------------------------------------------


async def test_a_known_name_asks_nobody(bench: Bench) -> None:
    bench.serve("org/base")
    await bench.pool.learn_models()
    assert (await bench.pool.resolve(BASE)).context_tokens == 64
    assert len(bench.forwarder.asked) == 1


async def test_a_model_is_missing_when_every_upstream_has_told_and_none_lists_it() -> None:
    bench = Bench("http://a", "http://b", offered=(ModelName("org/base", "org/base"), ModelName("mine", "alias")))
    bench.serve("org/base")
    await bench.pool.learn_models()
    assert bench.pool.missing_models() == ()
    bench.serve("other", url="http://b")
    await bench.pool.learn_models()
    assert bench.pool.missing_models() == ("mine=alias",)
    bench.serve("other", "alias", url="http://b")
    await bench.pool.learn_models()
    assert bench.pool.missing_models() == ()
    bench.pool.replace(["http://a"])
    assert bench.pool.missing_models() == ("mine=alias",)


async def test_before_any_upstream_has_answered_it_is_overloaded(bench: Bench) -> None:
    with pytest.raises(Overloaded):
        await bench.pool.resolve(BASE)
    bench.clock.advance(60.0)
    bench.serve("org/base")
    assert (await bench.pool.resolve(BASE)).upstream_name == "org/base"


async def test_a_wave_of_clients_with_a_new_name_asks_once(bench: Bench) -> None:
    bench.forwarder.gate = asyncio.Event()
    wave = [asyncio.create_task(bench.pool.resolve(BASE)) for _ in range(50)]
    await until(lambda: bench.forwarder.asked)
    bench.serve("org/base")
    bench.forwarder.gate.set()
    assert {target.upstream_name for target in await asyncio.gather(*wave)} == {"org/base"}
    assert len(bench.forwarder.asked) == 1


async def test_a_client_that_gives_up_does_not_take_the_answer_from_others(bench: Bench) -> None:
    bench.forwarder.gate = asyncio.Event()
    first, second = (asyncio.create_task(bench.pool.resolve(BASE)) for _ in range(2))
    await until(lambda: bench.forwarder.asked)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    bench.serve("org/base")
    bench.forwarder.gate.set()
    assert (await second).upstream_name == "org/base"


async def test_an_adapter_loaded_just_after_the_upstreams_were_asked_is_found(bench: Bench) -> None:
    """A trainer loads it and binds it at once: a 404 would end the run."""
    bench.serve("org/base")
    await bench.pool.learn_models()
    bench.serve("org/base", "run-1")
    assert (await bench.pool.resolve(ADAPTER)).upstream_name == "run-1"


async def test_an_answer_that_was_under_way_is_not_taken_for_a_new_name(bench: Bench) -> None:
    bench.serve("org/base")
    await bench.pool.learn_models()
    bench.forwarder.gate = asyncio.Event()
    early = asyncio.create_task(bench.pool.resolve(ModelRef(base_model="nope")))
    await until(lambda: len(bench.forwarder.asked) == 2)
    late = asyncio.create_task(bench.pool.resolve(ADAPTER))
    await asyncio.sleep(0)
    bench.forwarder.gate.set()
    with pytest.raises(NotFound):
        await early
    bench.serve("org/base", "run-1")
    assert (await late).upstream_name == "run-1"


async def test_a_name_that_nobody_serves_does_not_hammer_the_upstreams(bench: Bench) -> None:
    bench.serve("org/base")
    await bench.pool.learn_models()
    wave = [bench.pool.resolve(ModelRef(base_model="nope")) for _ in range(100)]
    outcomes = await asyncio.gather(*wave, return_exceptions=True)
    assert all(isinstance(outcome, NotFound) for outcome in outcomes)
    assert len(bench.forwarder.asked) == 2
    assert bench.slept_s == [2.0]


async def test_an_upstream_that_does_not_answer_keeps_what_it_told(bench: Bench) -> None:
    bench.serve("org/base")
    await bench.pool.learn_models()
    for reply in (REFUSED, b"<html>", listing()):
        bench.forwarder.replies["http://a"] = reply
        await bench.pool.learn_models()
        assert bench.pool.catalogue.known is (reply != listing())


async def test_the_models_of_all_upstreams_are_offered() -> None:
    bench = Bench("http://a", "http://b")
    bench.serve("one")
    bench.serve("two", url="http://b")
    await bench.pool.learn_models()
    assert set(bench.pool.catalogue.base_models()) == {"one", "two"}


async def test_closing_ends_a_question_under_way(bench: Bench) -> None:
    bench.forwarder.gate = asyncio.Event()
    asking = asyncio.create_task(bench.pool.resolve(BASE))
    await until(lambda: bench.forwarder.asked)
    await bench.pool.close()
    outcome = (await asyncio.gather(asking, return_exceptions=True))[0]
    assert isinstance(outcome, asyncio.CancelledError)


# -- choosing ---------------------------------------------------------------------------------------------------------


async def test_a_sample_goes_to_an_upstream_that_has_its_model() -> None:
    """Also when that one has just failed, or is busy: the other's 404 would end the client's run."""
    bench = Bench("http://a", "http://b", "http://c")
    bench.serve("one", "both", url="http://a")
    bench.serve("two", "both", url="http://b")
    await bench.pool.learn_models()
    one, two = bench.pool.choose("one"), bench.pool.choose("two")
    assert (one.url, two.url) == ("http://a", "http://b")
    assert bench.pool.choose("one", one) is one
    one.failed(bench.clock.monotonic_s())
    assert bench.pool.choose("one") is one
    assert bench.pool.choose("both") is two


async def test_a_model_that_no_upstream_lists_is_asked_of_any() -> None:
    bench = Bench("http://a", "http://b")
    bench.serve("one", url="http://a")
    bench.forwarder.replies["http://b"] = BUSY
    await bench.pool.learn_models()
    first = bench.pool.choose("other")
    assert bench.pool.choose("other", first) is not first


async def test_an_upstream_that_comes_later_is_chosen_from_then_on() -> None:
    bench = Bench("http://a", "http://b")
    bench.serve("one", url="http://a")
    await bench.pool.learn_models()
    first = bench.pool.choose("one")
    assert bench.pool.choose("one", first) is first
    bench.serve("one", url="http://b")
    # It had refused, so it is probed long before everybody is asked again.
    bench.clock.advance(1.0)
    await bench.pool.probe()
    assert bench.pool.choose("one", first).url == "http://b"


# -- probing ----------------------------------------------------------------------------------------------------------


async def test_only_upstreams_in_doubt_are_probed() -> None:
    bench = Bench("http://idle", "http://failed")
    failed = bench.pool.choose("org/base", bench.pool.choose("org/base"))
    failed.failed(bench.clock.monotonic_s())
    await bench.pool.probe()
    assert bench.forwarder.asked == [failed.url]


async def test_an_upstream_that_refuses_for_long_has_its_exchanges_broken_off(bench: Bench) -> None:
    """D18"""
    exchange = bench.open_exchange()
    for expected in (None, BreakKind.DRAINING):
        await bench.pool.probe()
        assert exchange.kind is expected
        assert bench.pool.all_down
        bench.clock.advance(REFUSED_FOR_S)


async def test_a_restart_behind_a_proxy_breaks_nothing_off(bench: Bench) -> None:
    """D18: it refused, and then took a connection again."""
    exchange = bench.open_exchange()
    await bench.pool.probe()
    bench.clock.advance(REFUSED_FOR_S - 1.0)
    bench.serve("org/base")
    await bench.pool.probe()
    bench.forwarder.replies.clear()
    bench.clock.advance(REFUSED_FOR_S)
    await bench.pool.probe()
    assert exchange.kind is None


async def test_a_busy_upstream_is_not_broken(bench: Bench) -> None:
    exchange = bench.open_exchange()
    bench.forwarder.replies["http://a"] = BUSY
    for _ in range(3):
        bench.clock.advance(REFUSED_FOR_S)
        await bench.pool.probe()
    assert exchange.kind is None
    assert not bench.pool.all_down


async def test_healthy_traffic_is_not_probed(bench: Bench) -> None:
    bench.serve("org/base")
    bench.open_exchange()
    bench.pool.completed(bench.pool.choose("org/base"))
    await bench.pool.probe()
    assert bench.forwarder.asked == []
    bench.clock.advance(10.0)
    await bench.pool.probe()
    assert bench.forwarder.asked == ["http://a"]


# -- another list -----------------------------------------------------------------------------------------------------


async def test_another_list_of_upstreams_counts_at_once() -> None:
    bench = Bench("http://a", "http://b")
    bench.serve("one", url="http://a")
    bench.serve("one", url="http://b")
    bench.serve("one", "two", url="http://c")
    await bench.pool.learn_models()
    kept = next(
        u for u in (bench.pool.choose("one"), bench.pool.choose("one", bench.pool.choose("one"))) if "b" in u.url
    )
    bench.pool.replace(["http://b", "http://c"])
    assert bench.pool.changed.is_set()
    assert bench.pool.choose("one") is kept
    await bench.pool.learn_models()
    assert not bench.pool.changed.is_set()
    assert bench.pool.choose("one", kept).url == "http://c"
    assert set(bench.pool.catalogue.base_models()) == {"one", "two"}
    assert [(told.url, told.state) for told in bench.pool.statuses()] == [("http://b", "up"), ("http://c", "up")]


async def test_the_same_list_changes_nothing(bench: Bench) -> None:
    before = bench.pool.choose("org/base")
    bench.pool.replace(["http://a"])
    assert not bench.pool.changed.is_set()
    assert bench.pool.choose("org/base") is before


async def test_what_runs_at_an_upstream_that_left_runs_to_its_end(bench: Bench) -> None:
    exchange = bench.open_exchange()
    old = bench.pool.choose("org/base")
    bench.pool.replace(["http://b"])
    assert exchange.kind is None
    assert [(told.url, told.state, told.in_flight) for told in bench.pool.statuses()] == [
        ("http://b", "up", 0),
        ("http://a", "leaving", 1),
    ]
    bench.pool.replace(["http://b", "http://a"])
    assert bench.pool.statuses()[1].in_flight == 1
    bench.pool.replace(["http://b"])
    old.attempts.clear()
    assert [told.url for told in bench.pool.statuses()] == ["http://b"]


async def test_an_upstream_that_left_and_hangs_is_broken_off(bench: Bench) -> None:
    """D18: a trainer that stops vLLM here and starts it elsewhere."""
    exchange = bench.open_exchange()
    bench.serve("org/base", url="http://b")
    bench.pool.replace(["http://b"])
    await bench.pool.probe()
    bench.clock.advance(REFUSED_FOR_S)
    await bench.pool.probe()
    assert exchange.kind is BreakKind.DRAINING
    assert not bench.pool.all_down


async def test_until_a_new_upstream_has_told_its_models_the_old_ones_count(bench: Bench) -> None:
    """A publication must not turn submissions away for the time of a question."""
    bench.serve("org/base")
    await bench.pool.learn_models()
    bench.pool.replace(["http://b"])
    assert (await bench.pool.resolve(BASE)).context_tokens == 64
    assert bench.pool.choose("org/base").url == "http://b"


async def test_what_an_upstream_tells_that_has_left_meanwhile_is_not_kept(bench: Bench) -> None:
    bench.serve("org/base")
    bench.forwarder.gate = asyncio.Event()
    learning = asyncio.create_task(bench.pool.learn_models())
    await until(lambda: bench.forwarder.asked)
    bench.pool.replace(["http://b"])
    bench.forwarder.gate.set()
    await learning
    assert not bench.pool.catalogue.known


async def test_who_minds_hears_of_what_broke(bench: Bench) -> None:
    """It may have moved: the list is read again."""
    upstream = bench.pool.choose("org/base")
    bench.pool.completed(upstream)
    assert not bench.pool.broken.is_set()
    bench.pool.broke(upstream)
    assert bench.pool.broken.is_set()
    bench.pool.broken.clear()
    await bench.pool.learn_models()
    assert bench.pool.broken.is_set()
