"""Slots of keys, and a cluster's map of them."""

from __future__ import annotations

import pytest

from shared.core.model import SampleKey
from shared.redis.cluster import SlotRange, parse_slots, slot_of
from shared.store.schema import Keys


@pytest.mark.parametrize(
    ("key", "slot"),
    # Values of the cluster specification, and of CLUSTER KEYSLOT for the odd ones.
    [
        ("123456789", 12739),
        ("foo", 12182),
        ("{foo}bar", 12182),
        ("bar{foo}{zap}", 12182),
        ("foo{}{bar}", 8363),
        ("foo{{bar}}zap", 4015),
    ],
)
def test_slots(key: str, slot: int) -> None:
    assert slot_of(key) == slot


def test_keys_of_a_session_and_of_an_owner_are_together_and_samples_are_spread() -> None:
    keys = Keys("gw")
    session = {keys.log("K", 0), keys.log("K", 1), keys.clones("K"), keys.announcement("K")}
    owner = {keys.open_set("O"), keys.lease("O"), keys.inbox("O"), keys.control("O")}
    assert len({slot_of(key) for key in session}) == 1
    assert len({slot_of(key) for key in owner}) == 1
    samples = {slot_of(keys.sample(SampleKey("K", number))) for number in range(100)}
    assert len(samples) > 90


def test_the_map_of_a_cluster() -> None:
    reply = [
        [0, 9, [b"10.0.0.1", 7000, b"id", []], [b"10.0.0.2", 7000, b"id", []]],
        [10, 16383, [b"", 7001, b"id"]],
    ]
    assert parse_slots(reply, "asked") == [SlotRange(0, 9, "10.0.0.1", 7000), SlotRange(10, 16383, "asked", 7001)]
    assert parse_slots([[0, 1, [None, 1, b"id"]], [2, 3, [b"?", 1, b"id"]]], "h") == [
        SlotRange(0, 1, "h", 1),
        SlotRange(2, 3, "h", 1),
    ]
