"""A place is written through its view, and is then bytes like any other."""

from __future__ import annotations

import tracemalloc

import pytest

from workers.entry import keep_freed_memory
from workers.upstream.client.connection import BodyBuffer


@pytest.mark.parametrize("size_bytes", [0, 1, 2, 5_000, 4 * 1024 * 1024, 9_000_001])
def test_what_was_written(size_bytes: int) -> None:
    told = (b"0123456789" * (size_bytes // 10 + 1))[:size_bytes]
    place = BodyBuffer(size_bytes)
    place.view[:] = told
    assert place.whole() == told


def test_what_was_not_written_is_zeros() -> None:
    assert BodyBuffer(5_000_000).whole() == bytes(5_000_000)


def test_it_is_no_copy_unless_somebody_could_still_write() -> None:
    place, watched = BodyBuffer(5_000_000), BodyBuffer(5_000_000)
    left = watched.view[1:2]
    tracemalloc.start()
    try:
        first = place.whole()
        assert tracemalloc.get_traced_memory()[1] < 100_000
        second = watched.whole()
        assert tracemalloc.get_traced_memory()[1] > 5_000_000
    finally:
        tracemalloc.stop()
    left[0] = 1
    assert first == second == bytes(5_000_000)


def test_what_is_freed_may_be_kept_as_often_as_one_likes() -> None:
    keep_freed_memory()
    keep_freed_memory()
