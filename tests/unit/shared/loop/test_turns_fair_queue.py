"""Parties take turns, each in its own order, and nobody is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.loop.turns import FairQueue


def emptied(line: FairQueue[str]) -> list[str]:
    return [line.take() for _ in range(len(line))]


def line_of(items: str) -> FairQueue[str]:
    """Each item's first letter is its key_digest."""
    line: FairQueue[str] = FairQueue()
    for item in items.split():
        line.add(item[:1].encode(), item)
    return line


@pytest.mark.parametrize(
    ("items", "order"),
    [
        ("", ""),
        ("a1 a2 a3", "a1 a2 a3"),
        ("a1 a2 a3 b1", "a1 b1 a2 a3"),
        ("a1 a2 a3 b1 b2 c1", "a1 b1 c1 a2 b2 a3"),
    ],
)
def test_parties_take_turns(items: str, order: str) -> None:
    assert emptied(line_of(items)) == order.split()


def test_who_comes_back_waits_for_the_others_once() -> None:
    line = line_of("a1 b1 a2 b2")
    assert [line.take(), line.take(), line.take()] == ["a1", "b1", "a2"]
    line.add(b"a", "a3")
    assert emptied(line) == ["b2", "a3"]


def test_who_gives_up_costs_its_party_no_turn() -> None:
    line = line_of("a1 a2 a3 b1 b2 b3")
    for gone in ("a1", "a2", "a4"):
        line.discard(b"a", gone)
    line.discard(b"c", "c1")
    assert emptied(line) == ["a3", "b1", "b2", "b3"]


def test_a_party_of_which_all_have_given_up_is_forgotten() -> None:
    line = line_of("a1 a2 b1")
    line.discard(b"a", "a1")
    line.discard(b"a", "a2")
    assert len(line) == 1
    line.add(b"a", "a3")
    assert emptied(line) == ["b1", "a3"]
    assert not line


def test_nobody_is_there() -> None:
    line: FairQueue[str] = FairQueue()
    assert not line
    with pytest.raises(IndexError, match="empty"):
        line.take()


@given(st.lists(st.sampled_from("abcd"), max_size=60))
def test_none_is_lost_and_none_waits_for_more_than_one_of_each_other_before_each_of_its_own(parties: list[str]) -> None:
    items = [f"{key_digest}{number}" for number, key_digest in enumerate(parties)]
    order = emptied(line_of(" ".join(items)))
    assert sorted(order) == sorted(items)
    for key_digest in set(parties):
        own = [item for item in order if item.startswith(key_digest)]
        assert own == [item for item in items if item.startswith(key_digest)]
        for place, item in enumerate(own):
            ahead = order[: order.index(item)]
            assert all(
                sum(other.startswith(name) for other in ahead) <= place + 1 for name in set(parties) - {key_digest}
            )
