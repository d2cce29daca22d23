"""The store is everybody's: what fills it is refused, and what empties it or keeps work alive is served."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from shared.config import Settings
from shared.core import ids
from shared.core.callers import KeyLimits
from shared.core.lifecycle import State
from shared.core.model import SampleKey
from shared.core.record import Claim
from tests.app_bench import KEY_A, KEY_B, KEYS, AppBench, opened, request_id, session_of, settled
from tests.worker_bench import OTHER_OWNER, SESSION_ID, session
from workers.samples.expiry import UnfetchedResults
from workers.samples.live import Ending
from workers.samples.store_share import pack, unpack

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PAYLOAD = bytes(100_000)
SECRET_A = ids.owner_secret(KEY_A)
CLAIM = Claim("0123456789abcdef", 1, 1, bytes(16))


@pytest.fixture
async def bench() -> AsyncIterator[AppBench]:
    async with opened(poll_timeout_s=0.01) as made:
        yield made


async def test_a_full_store_takes_nothing_new(bench: AppBench) -> None:
    """It takes no session, sampler or sample, and keeps no record of what it refused."""
    bench.server.is_full = True
    sampler = {"session_id": SESSION_ID, "sampling_session_seq_id": 0, "base_model": "sim/tiny"}
    answers = [
        await bench.post("/create_session", {}),
        await bench.post("/create_sampling_session", sampler),
        await bench.asample(1),
    ]
    assert [answered.status for answered in answers] == [429] * 3
    assert all("the result store is full" in answered.json["detail"] for answered in answers[:2])
    assert not bench.server.samples
    await bench.housekeeping.tend_store()
    assert not bench.server.sessions


async def test_a_full_store_serves_heartbeats_polls_and_acknowledgements(bench: AppBench) -> None:
    name = await settled(bench)
    bench.server.is_full = True
    assert (await bench.post("/session_heartbeat", {"session_id": SESSION_ID})).status == 200
    assert (await bench.retrieve(name)).status == 200
    assert (await bench.poll_session(retrieved_request_ids=[request_id(1)])).status == 200
    await bench.expiry.flush()
    assert bench.counters.acknowledged == 1


async def fill(bench: AppBench, key: str, results: int) -> list[str]:
    """Settle results of `PAYLOAD` for a key; nobody fetches them."""
    ending = Ending(State.READY, PAYLOAD)
    return [await settled(bench, ending, seq_id, of=session_of(key), key=key) for seq_id in range(results)]


async def ask(bench: AppBench, key: str, seq_id: int) -> int:
    return (await bench.asample(seq_id, of=session_of(key), key=key)).status


async def test_a_key_that_fetches_nothing_is_refused_before_others_are() -> None:
    async with opened(api_keys=KEYS) as bench:
        bench.server.memory_bytes = 20 * len(PAYLOAD)
        await fill(bench, KEY_A, 18)
        await bench.housekeeping.tend_store()
        refused = await bench.asample(50, of=session_of(KEY_A), key=KEY_A)
        assert (refused.status, bench.counters.rejected_share) == (429, 1)
        assert "the result store is nearly full, and this key left more than its share" in refused.json["detail"]
        assert await ask(bench, KEY_B, 50) == 200


async def test_what_is_fetched_or_acknowledged_no_longer_counts() -> None:
    async with opened(api_keys=KEYS) as bench:
        bench.server.memory_bytes = 20 * len(PAYLOAD)
        names = await fill(bench, KEY_A, 18)
        await bench.housekeeping.tend_store()
        for name in names[:9]:
            assert (await bench.retrieve(name, key=KEY_A)).status == 200
        assert await ask(bench, KEY_A, 50) == 200
        await bench.poll_session(of=session_of(KEY_A), key=KEY_A, retrieved_request_ids=names[9:])
        assert ids.owner_tag(ids.owner_secret(KEY_A)) not in bench.unfetched.by_key


async def test_the_store_that_fills_between_two_looks_is_noticed() -> None:
    async with opened(api_keys=KEYS) as bench:
        bench.server.memory_bytes = 20 * len(PAYLOAD)
        await bench.housekeeping.tend_store()
        await fill(bench, KEY_A, 18)
        assert await ask(bench, KEY_A, 50) == 429
        assert await ask(bench, KEY_B, 50) == 200


async def test_a_key_has_one_share_of_the_store_on_all_workers() -> None:
    """What it left elsewhere counts here, and what others delivered does not."""
    async with opened(api_keys=KEYS) as here:
        other = await AppBench(here.server, OTHER_OWNER, api_keys=KEYS).open()
        here.server.memory_bytes = 20 * len(PAYLOAD)
        names = await fill(other, KEY_A, 18)
        await other.housekeeping.tend_store()
        await here.housekeeping.tend_store()
        assert await ask(here, KEY_A, 50) == 429
        assert await ask(here, KEY_B, 50) == 200
        for name in names:
            assert (await here.retrieve(name, key=KEY_A)).status == 200
        await here.expiry.flush()
        await other.housekeeping.tend_store()
        await here.housekeeping.tend_store()
        assert await ask(here, KEY_A, 50) == 200
        await other.close()


async def test_a_worker_that_is_gone_reports_nothing_after_a_lease() -> None:
    async with opened(api_keys=KEYS) as here:
        here.server.memory_bytes = 20 * len(PAYLOAD)
        await here.store.report_unfetched(OTHER_OWNER, b"%s=99999999" % ids.owner_tag(SECRET_A).encode(), ttl_s=30)
        await fill(here, KEY_B, 18)
        await here.housekeeping.tend_store()
        assert await ask(here, KEY_A, 50) == 429
        here.clock.advance(31)
        await here.renew_lease()
        await here.housekeeping.tend_store()
        assert await ask(here, KEY_A, 50) == 200


def test_results_too_many_to_be_remembered_count_until_they_expire() -> None:
    unfetched = UnfetchedResults(most=10)
    for number in range(100):
        unfetched.add(SampleKey("session", number), CLAIM, float(number), "a", 744)
    assert (len(unfetched), unfetched.by_key) == (10, {"a": 100_000})
    unfetched.take_settled_before(95.0)
    assert unfetched.by_key == {"a": 40_000 - 1_000 * 5 + 0}
    unfetched.take_settled_before(1_000.0)
    assert unfetched.by_key == {}


def test_a_report_that_nobody_wrote_is_read_as_far_as_it_goes() -> None:
    counted = {"a": 1, "b": 2**40}
    assert unpack(pack(counted | {"": 7})) == counted
    assert unpack(b"a=1 b=x =3 c \xff=4 d=99999999999999999999 \xb2=\xb2") == {"a": 1, "": 3, "\ufffd": 4}


def test_what_is_known_of_a_session_outlives_it_and_its_results() -> None:
    assert Settings(session_timeout_s=300, undelivered_ttl_s=3600).session_ttl_s == 3900
    assert Settings(session_timeout_s=7200, undelivered_ttl_s=3600).session_ttl_s == 7500


# -- sessions ------------------------------------------------------------------------------------------------------

LIMITED = (replace(KEYS[0], limits=KeyLimits(max_sessions=1)), KEYS[1])


async def test_a_session_is_counted_by_whatever_route_it_is_first_seen() -> None:
    """Ids that the gateway made but that nobody opened: samplers, samples and heartbeats count like a creation."""
    async with opened(api_keys=LIMITED) as bench:
        assert (await bench.post("/create_session", {}, key=KEY_A)).status == 200
        made_up = ids.new_session_id(bytes(range(16)), SECRET_A)
        sampler = {"session_id": made_up, "sampling_session_seq_id": 0, "base_model": "sim/tiny"}
        answers = [
            await bench.post("/session_heartbeat", {"session_id": made_up}, key=KEY_A),
            await bench.post("/create_sampling_session", sampler, key=KEY_A),
            await bench.asample(of=session(0, made_up, SECRET_A), key=KEY_A),
        ]
        assert [answered.status for answered in answers] == [429] * 3
        assert all("(max-sessions)" in answered.json["detail"] for answered in answers)
        await bench.housekeeping.tend_store()
        assert made_up not in bench.server.sessions


async def test_a_session_that_fell_silent_is_counted_again() -> None:
    """Its place may have been taken; a poll does not take it back."""
    async with opened(api_keys=LIMITED, poll_timeout_s=0.01) as bench:
        first = (await bench.post("/create_session", {}, key=KEY_A)).json["session_id"]
        bench.clock.advance(301)
        await bench.renew_lease()
        second = (await bench.post("/create_session", {}, key=KEY_A)).json["session_id"]
        for _ in range(2):
            assert (await bench.post("/session_heartbeat", {"session_id": first}, key=KEY_A)).status == 429
            await bench.retrieve(request_id(1, session(0, first, SECRET_A)), key=KEY_A)
            await bench.housekeeping.tend_store()
        assert (await bench.asample(of=session(0, first, SECRET_A), key=KEY_A)).status == 429
        assert (await bench.post("/session_heartbeat", {"session_id": second}, key=KEY_A)).status == 200


async def test_a_sample_without_a_session_makes_no_record_of_one() -> None:
    """It counts against max-in-flight only; nor do its polls leave a record."""
    async with opened(api_keys=LIMITED, poll_timeout_s=0.01) as bench:
        lone: dict[str, Any] = {"sampling_session_id": None, "seq_id": None, "base_model": "sim/tiny"}
        promised = [await bench.asample(key=KEY_A, **lone) for _ in range(3)]
        assert [answered.status for answered in promised] == [200] * 3
        for answered in promised:
            await bench.retrieve(answered.json["request_id"], key=KEY_A)
            of = answered.json["request_id"].partition(":")[0]
            assert (await bench.asample(2, sampling_session_id=of, key=KEY_A)).status == 200
        await bench.housekeeping.tend_store()
        assert not bench.server.sessions
        assert not bench.server.sessions_of[ids.owner_tag(SECRET_A)]


async def test_a_full_store_still_admits_a_session_that_it_knows(bench: AppBench) -> None:
    """A worker that sees it for the first time serves its heartbeats."""
    assert (await bench.post("/session_heartbeat", {"session_id": SESSION_ID})).status == 200
    other = await AppBench(bench.server, OTHER_OWNER).open()
    bench.server.is_full = True
    bench.clock.advance(5)
    assert (await other.post("/session_heartbeat", {"session_id": SESSION_ID})).status == 200
    assert bench.server.sessions[SESSION_ID].seen_ms == bench.clock.wall_ms()
    await other.close()
