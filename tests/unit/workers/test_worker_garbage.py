"""The collector looks at little at a time, and start-up's objects not at all."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest

from workers import worker

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def collector() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


@pytest.mark.usefixtures("collector")
def test_what_is_in_flight_is_looked_through_in_small_parts() -> None:
    worker._settle_garbage_collection()
    young, middle, _ = gc.get_threshold()
    # The longest look is at the young and those that stayed the last time; Python's default would be 700.
    assert 700 < young * (middle + 2) <= 20_000
    assert gc.get_freeze_count() > 0


@pytest.mark.usefixtures("collector")
def test_those_that_stayed_are_looked_through_once_more_and_then_left_alone() -> None:
    worker._settle_garbage_collection()
    seen: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(note)
    try:
        kept = [[number] for number in range(100_000)]
    finally:
        gc.callbacks.remove(note)
    assert len(kept) == 100_000
    assert seen.count(2) == 0
    assert abs(seen.count(0) - seen.count(1)) <= 1 < len(seen)
