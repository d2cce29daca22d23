"""Admission: one row per signal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.core.admission import (
    ALONE,
    Limits,
    Load,
    Tenancy,
    admit,
    admit_buffer,
    most_polls,
    refuse_poll,
    refuse_request,
    refuse_session,
    worker_part,
)

LIMITS = Limits(max_in_flight=16, max_in_flight_bytes=1600)
# One of two keys that hold something, without limits of its own.
TENANT = Tenancy(1, 100, None, None, active_keys=2, shared=True)


def reason(load: Load, sample_bytes: int = 1, tenancy: Tenancy = ALONE) -> str | None:
    rejection = admit(load, LIMITS, sample_bytes, tenancy)
    return rejection.reason if rejection else None


@pytest.mark.parametrize(
    ("load", "sample_bytes", "expected"),
    [
        (Load(0, 0), 1, None),
        (Load(15, 1500), 100, None),
        (Load(16, 0), 1, "in_flight"),
        (Load(1, 1550), 51, "bytes"),
        (Load(0, 0), 5000, None),
        (Load(0, 0, store_full=True), 1, "store_full"),
        (Load(0, 0, draining=True), 1, "draining"),
        (Load(0, 0, store_refilling=True), 1, "store_refilling"),
        (Load(16, 1600, store_full=True, draining=True), 1, "draining"),
    ],
)
def test_one_row_per_signal(load: Load, sample_bytes: int, expected: str | None) -> None:
    assert reason(load, sample_bytes) == expected


@pytest.mark.parametrize(
    ("changes", "sample_bytes", "expected"),
    [
        ({"in_flight": 4, "max_in_flight": 5}, 1, None),
        ({"in_flight": 5, "max_in_flight": 5}, 1, "key"),
        ({"in_flight_bytes": 100, "max_in_flight_bytes": 200}, 100, None),
        ({"in_flight_bytes": 100, "max_in_flight_bytes": 200}, 101, "key"),
        # One of any size, as with the worker's own limit.
        ({"in_flight": 0, "in_flight_bytes": 0, "max_in_flight_bytes": 200}, 500, None),
        # A key that is alone is held to its limits as well.
        ({"in_flight": 5, "max_in_flight": 5, "shared": False, "active_keys": 1}, 1, "key"),
    ],
)
def test_a_keys_own_limits(changes: dict[str, Any], sample_bytes: int, expected: str | None) -> None:
    assert reason(Load(6, 600), sample_bytes, replace(TENANT, **changes)) == expected


@pytest.mark.parametrize(
    ("held", "tenancy", "expected"),
    [
        # Not nearly full (14 of 16): everybody takes what is there.
        (13, replace(TENANT, in_flight=13), None),
        # A lone key leaves an eighth for whoever comes; without other keys nobody can come.
        (14, replace(TENANT, in_flight=14, active_keys=1), "share"),
        (14, replace(TENANT, in_flight=14, active_keys=1, shared=False), None),
        # The newcomer finds room, up to its share: a third, as there is always one more expected.
        (14, replace(TENANT, in_flight=0, in_flight_bytes=0), None),
        (15, replace(TENANT, in_flight=4), None),
        (15, replace(TENANT, in_flight=5), "share"),
        # Nobody gets more than there is.
        (16, replace(TENANT, in_flight=0, in_flight_bytes=0), "in_flight"),
    ],
)
def test_shares_of_a_worker_that_is_nearly_full(held: int, tenancy: Tenancy, expected: str | None) -> None:
    """E4"""
    assert reason(Load(held, 0), 1, tenancy) == expected


@pytest.mark.parametrize(
    ("held_bytes", "of_key", "sample_bytes", "expected"),
    [(1300, 1300, 100, None), (1350, 1000, 100, "share"), (1350, 400, 100, None), (1550, 0, 100, "bytes")],
)
def test_shares_of_the_bytes(held_bytes: int, of_key: int, sample_bytes: int, expected: str | None) -> None:
    """E4"""
    assert reason(Load(2, held_bytes), sample_bytes, replace(TENANT, in_flight_bytes=of_key)) == expected


@pytest.mark.parametrize("floods", [1, 2, 3, 7, 15])
def test_however_many_flood_a_newcomer_finds_room(floods: int) -> None:
    """E4: keys that take whatever they are given, until nothing moves; then one more asks."""
    limits = Limits(max_in_flight=64, max_in_flight_bytes=1 << 30)
    held = [0] * floods
    moved = True
    while moved:
        moved = False
        for index, in_flight in enumerate(held):
            active = sum(1 for count in held if count) + (in_flight == 0)
            tenancy = Tenancy(in_flight, 0, None, None, active, shared=True)
            if admit(Load(sum(held), 0), limits, 1, tenancy) is None:
                held[index] += 1
                moved = True
    newcomer = Tenancy(0, 0, None, None, floods + 1, shared=True)
    assert admit(Load(sum(held), 0), limits, 1, newcomer) is None
    assert max(held) - min(held) <= 1


def test_refusals_name_the_limit() -> None:
    over = admit(Load(6, 0), LIMITS, 1, replace(TENANT, in_flight=5, max_in_flight=5))
    assert over is not None and "its limit for this worker is 5 (max-in-flight)" in over.message
    over = admit(Load(15, 0), LIMITS, 1, replace(TENANT, in_flight=9))
    assert over is not None and "more than its share (1/3) of the samples" in over.message


@pytest.mark.parametrize(("limit", "workers", "part"), [(None, 4, None), (8, 4, 2), (9, 4, 3), (1, 4, 1)])
def test_a_workers_part_of_a_limit(limit: int | None, workers: int, part: int | None) -> None:
    assert worker_part(limit, workers) == part


@pytest.mark.parametrize(
    ("n", "max_tokens", "limit", "refused"),
    [(4, 100, None, False), (4, 100, 400, False), (4, 101, 400, True), (1, 401, 400, True)],
)
def test_what_one_request_may_ask_for(n: int, max_tokens: int, limit: int | None, refused: bool) -> None:
    reason = refuse_request(n, max_tokens, limit)
    assert (reason is not None) is refused
    if reason:
        assert f"{n} x {max_tokens} = {n * max_tokens}" in reason and "at most 400 (max-request-tokens)" in reason


@pytest.mark.parametrize(("others", "limit", "refused"), [(5, None, False), (2, 3, False), (3, 3, True)])
def test_sessions_of_a_key(others: int, limit: int | None, refused: bool) -> None:
    assert (refuse_session(others, limit) is not None) is refused


@given(
    st.integers(0, 20),
    st.integers(0, 200),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
    st.integers(1, 10),
    st.integers(1, 100),
    st.integers(0, 100),
)
def test_the_only_key_is_asked_for_less_and_told_the_same(
    in_flight: int, held_bytes: int, state: tuple[bool, bool, bool], most: int, most_bytes: int, sample_bytes: int
) -> None:
    load, limits = Load(in_flight, held_bytes, *state), Limits(most, most_bytes)
    assert admit(load, limits, sample_bytes, ALONE) == admit(load, limits, sample_bytes, replace(ALONE))


@pytest.mark.parametrize(
    ("load_bytes", "changes", "held_bytes", "more_bytes", "expected"),
    [
        # The key's own limit. What it holds of samples does not count: results must still be fetched.
        (100, {"buffered_bytes": 100, "max_in_flight_bytes": 200}, 0, 100, None),
        (100, {"buffered_bytes": 100, "max_in_flight_bytes": 200}, 0, 101, "key"),
        (100, {"buffered_bytes": 100, "max_in_flight_bytes": 200}, 60, 101, "key"),
        (100, {"in_flight_bytes": 10_000, "buffered_bytes": 100, "max_in_flight_bytes": 200}, 0, 100, None),
        # One of any size, also while it grows, whatever others hold.
        (0, {"max_in_flight_bytes": 200}, 0, 5000, None),
        (100, {"buffered_bytes": 100, "max_in_flight_bytes": 200}, 100, 5000, None),
        (1600, {"buffered_bytes": 100}, 100, 5000, None),
        # The worker's limit, and a share of it for each key when it is nearly full.
        (1300, {"buffered_bytes": 100}, 0, 301, "bytes"),
        (1000, {"buffered_bytes": 500}, 0, 400, None),
        (1000, {"buffered_bytes": 500}, 0, 401, "share"),
        (1000, {"buffered_bytes": 500, "shared": False}, 0, 401, None),
    ],
)
def test_what_is_buffered(
    load_bytes: int, changes: dict[str, Any], held_bytes: int, more_bytes: int, expected: str | None
) -> None:
    load, tenancy = Load(6, 0, buffered_bytes=load_bytes), replace(TENANT, **changes)
    rejection = admit_buffer(load, LIMITS, held_bytes, more_bytes, tenancy)
    assert (rejection.reason if rejection else None) == expected


@pytest.mark.parametrize(("held_bytes", "more_bytes", "expected"), [(0, 600, None), (0, 601, "bytes"), (1000, 9, None)])
def test_the_only_key_buffers_what_the_worker_does(held_bytes: int, more_bytes: int, expected: str | None) -> None:
    rejection = admit_buffer(Load(0, 0, buffered_bytes=1000), LIMITS, held_bytes, more_bytes, ALONE)
    assert (rejection.reason if rejection else None) == expected


@pytest.mark.parametrize(("max_in_flight", "polls"), [(1, 16), (20, 24), (21, 26), (65_536, 78_644)])
def test_held_polls_of_a_key(max_in_flight: int, polls: int) -> None:
    """One for each sample, and a fifth more; a few in any case."""
    assert most_polls(max_in_flight) == polls
    assert refuse_poll(polls - 1, max_in_flight) is None
    assert refuse_poll(polls, max_in_flight) is not None
