"""What a key holds, and how that is seen from outside: its caps, its share, its revocation."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from shared.channel import KeyStatus
from shared.core.admission import ALONE
from shared.core.callers import ANONYMOUS, ApiKey, Caller, KeyLimits, Keyring
from shared.core.lifecycle import State
from tests.app_bench import KEY_A, KEY_B, KEYS, AppBench, asleep, request_id, session_of
from tests.waiting import until
from workers.samples.quota import KeyUsage

if TYPE_CHECKING:
    from tests.exchanges import Answered

A = Caller("a", b"a", b"A", KeyLimits(max_in_flight=9))
B = Caller("b", b"b", b"B")


def test_what_is_held_is_counted_by_key() -> None:
    key_usage = KeyUsage(2, shared=True)
    first, second = key_usage.take(A, 10), key_usage.take(A, 20)
    key_usage.take(B, 5)
    found = key_usage.tenancy(A)
    assert (found.in_flight, found.in_flight_bytes, found.active_keys) == (2, 30, 2)
    assert (found.max_in_flight, found.max_in_flight_bytes) == (5, None)
    key_usage.release(first, 10)
    key_usage.release(second, 20)
    assert key_usage.tenancy(A).in_flight == 0
    assert key_usage.tenancy(B).active_keys == 1, "a key that holds nothing is not active"
    assert key_usage.tenancy(A).active_keys == 2, "but for the one that asks"


def test_a_name_is_counted_for_over_the_change_of_its_key() -> None:
    key_usage = KeyUsage(1, shared=True)
    old, new = key_usage.take(A, 10), key_usage.take(Caller("a", b"n", b"N"), 20)
    old.tally.samples += 1
    new.tally.samples += 1
    key_usage.tally(A).rejected += 1
    assert key_usage.statuses(["a", "b"]) == (KeyStatus("a", 2, 30, samples=2, rejected=1),)
    key_usage.release(old, 10)
    key_usage.release(new, 20)
    assert key_usage.statuses(["a"]) == (KeyStatus("a", 0, 0, samples=2, rejected=1),)
    assert key_usage.statuses([]) == (), "it is in the file no more"


def test_the_anonymous_one_is_alone() -> None:
    key_usage = KeyUsage(2, shared=False)
    key_usage.release(key_usage.take(ANONYMOUS, 10), 10)
    assert key_usage.tenancy(ANONYMOUS) is ALONE


def limited(key: ApiKey, **limits: Any) -> ApiKey:
    return ApiKey(key.name, key.sha256, KeyLimits(**limits))


async def keyed(*keys: ApiKey, **settings: Any) -> AppBench:
    return await AppBench(api_keys=keys, **settings).open()


async def ask(bench: AppBench, key: str, seq_id: int = 1, **more: Any) -> Answered:
    return await bench.asample(seq_id, of=session_of(key), key=key, **more)


async def test_a_keys_cap_is_429_for_it_and_nobody_else() -> None:
    """E4"""
    bench = await keyed(limited(KEYS[0], max_in_flight=2), KEYS[1])
    assert [(await ask(bench, KEY_A, seq_id)).status for seq_id in (1, 2)] == [200, 200]
    refused = await ask(bench, KEY_A, 3)
    assert (refused.status, bench.counters.rejected_key) == (429, 1)
    assert "its limit for this worker is 2 (max-in-flight)" in refused.json["detail"]
    assert (await ask(bench, KEY_A, 2)).status == 200, "a duplicate takes nothing"
    assert [(await ask(bench, KEY_B, seq_id)).status for seq_id in (1, 2, 3)] == [200] * 3
    statuses = bench.key_usage.statuses(key.name for key in KEYS)
    assert [(key.in_flight, key.samples, key.rejected) for key in statuses] == [(2, 2, 1), (3, 3, 0)]
    bench.executor.finish(session_of(KEY_A).key(1))
    await until(lambda: bench.dispatcher.in_flight == 4)
    assert (await ask(bench, KEY_A, 3)).status == 200
    await bench.close()
    assert bench.holds_nothing()
    assert bench.key_usage.tenancy(A).active_keys == 1


async def test_a_flood_leaves_room_for_another_key() -> None:
    """E4"""
    bench = await keyed(*KEYS, max_in_flight=16)
    statuses = [(await ask(bench, KEY_A, seq_id)).status for seq_id in range(20)]
    assert statuses == [200] * 14 + [429] * 6
    assert bench.counters.rejected_share == 6
    assert (await ask(bench, KEY_B)).status == 200
    await bench.close()


async def test_bytes_count_for_the_key_until_its_result_is_written() -> None:
    bench = await keyed(limited(KEYS[0], max_in_flight_bytes=40_000), KEYS[1])
    assert [(await ask(bench, KEY_A, seq_id)).status for seq_id in (1, 2)] == [200, 200]
    refused = await ask(bench, KEY_A, 3)
    assert refused.status == 429
    assert "more than 40000 bytes (max-in-flight-bytes)" in refused.json["detail"]
    await bench.close()


@pytest.mark.parametrize(
    ("more", "status"),
    [
        ({"num_samples": 2}, 200),
        ({"num_samples": 3}, 403),
        # Nothing asked for is all that the context leaves: 64 less a prompt of 3.
        ({"sampling_params": {}}, 403),
        ({"sampling_params": {"max_tokens": 9}}, 403),
    ],
)
async def test_what_one_request_may_ask_for(more: dict[str, Any], status: int) -> None:
    """Refused for good: a 429 would be sent again for ever."""
    bench = await keyed(limited(KEYS[0], max_request_tokens=8), KEYS[1])
    answered = await ask(bench, KEY_A, **more)
    assert answered.status == status
    if status == 403:
        assert "at most 8 (max-request-tokens)" in answered.json["detail"]
        assert bench.dispatcher.in_flight == 0
    assert (await ask(bench, KEY_B, **more)).status == 200
    await bench.close()


async def test_a_session_too_many_is_429() -> None:
    bench = await keyed(limited(KEYS[0], max_sessions=1), KEYS[1])
    assert [(await bench.post("/create_session", key=KEY_A)).status for _ in range(2)] == [200, 429]
    assert (await bench.post("/create_session", key=KEY_B)).status == 200
    await bench.close()


async def test_what_runs_for_a_revoked_key_ends_and_its_polls_with_it() -> None:
    """Nobody could fetch it: what it would still generate is spent for nothing. Other keys notice nothing."""
    bench = await keyed(*KEYS)
    await ask(bench, KEY_A)
    await ask(bench, KEY_B)
    keys = [session_of(key).key(1) for key in (KEY_A, KEY_B)]
    await until(lambda: set(keys) == set(bench.executor.started))
    poll = asyncio.create_task(bench.retrieve(request_id(1, session_of(KEY_A)), key=KEY_A))
    await asleep(bench)
    bench.parts.live.keyring = Keyring(KEYS[1:])
    assert bench.dispatcher.end_revoked(bench.parts.live.keyring.knows) == 1
    assert (await poll).status == 410
    assert bench.executor.interrupted == keys[:1]
    assert [bench.state(key) for key in keys] == [State.STALE, State.PENDING]
    assert (await ask(bench, KEY_A)).status == 401
    assert (await bench.retrieve(request_id(1, session_of(KEY_A)), key=KEY_A)).status == 401
    await bench.close()
