"""When a gap in the messages of a worker ends, and what ends a connection of subscriptions."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

import hiredis
import pytest

from shared.core.errors import StoreUnavailable
from shared.redis.commands import Subscriptions

if TYPE_CHECKING:
    from shared.redis.connection import RedisConnection


class FakeConnection:
    def __init__(self) -> None:
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.sent: list[tuple[str, ...]] = []

    def send(self, *words: str) -> None:
        self.sent.append(words)

    def cut(self, why: str) -> None:
        if not self.lost.done():
            self.lost.set_result(why)


def confirm(subscriptions: Subscriptions, channel: str) -> None:
    subscriptions.on_push([b"subscribe", channel.encode(), 1])


async def subscribed(gaps: list[str], *channels: str) -> Subscriptions:
    """Subscribe, lose the connection and reconnect: every channel waits for its confirmation."""
    subscriptions = Subscriptions(lambda *_: None, lambda: gaps.append("over"))
    first, second = FakeConnection(), FakeConnection()
    subscriptions.on_up(cast("RedisConnection", first))
    asked = [asyncio.create_task(subscriptions.subscribe(channel)) for channel in channels]
    await asyncio.sleep(0)
    for channel in channels:
        confirm(subscriptions, channel)
    await asyncio.gather(*asked)
    first.lost.set_result("cut")
    await asyncio.sleep(0)
    subscriptions.on_up(cast("RedisConnection", second))
    assert sorted(second.sent) == [("SUBSCRIBE", channel) for channel in channels]
    return subscriptions


async def test_a_gap_is_over_with_the_last_channel() -> None:
    gaps: list[str] = []
    subscriptions = await subscribed(gaps, "a", "b")
    confirm(subscriptions, "a")
    assert gaps == []
    confirm(subscriptions, "b")
    assert gaps == ["over"]


async def test_a_channel_that_is_given_up_does_not_keep_the_gap_open() -> None:
    """C4: a lingering subscription ends at that moment; the others must still learn of the gap."""
    gaps: list[str] = []
    subscriptions = await subscribed(gaps, "a", "b")
    confirm(subscriptions, "a")
    subscriptions.unsubscribe("b")
    assert gaps == ["over"]
    confirm(subscriptions, "b")
    assert gaps == ["over"]


async def test_a_first_subscription_is_no_gap() -> None:
    gaps: list[str] = []
    subscriptions = Subscriptions(lambda *_: None, lambda: gaps.append("over"))
    subscriptions.on_up(cast("RedisConnection", FakeConnection()))
    asked = asyncio.create_task(subscriptions.subscribe("a"))
    await asyncio.sleep(0)
    confirm(subscriptions, "a")
    await asked
    assert gaps == []


def sharded(gaps: list[str]) -> tuple[Subscriptions, FakeConnection]:
    subscriptions = Subscriptions(lambda *_: None, lambda: gaps.append("over"), sharded=True)
    connection = FakeConnection()
    subscriptions.on_up(cast("RedisConnection", connection))
    return subscriptions, connection


async def test_a_channel_whose_slot_moves_away_ends_the_line() -> None:
    """The node ends it by itself; only a subscription that we cancelled may end without effect."""
    subscriptions, connection = sharded([])
    subscriptions.take_over("a")
    assert connection.sent == [("SSUBSCRIBE", "a")]
    subscriptions.unsubscribe("a")
    subscriptions.take_over("a")
    subscriptions.on_push([b"sunsubscribe", b"a", 0])
    assert not connection.lost.done()
    subscriptions.on_push([b"sunsubscribe", b"a", 0])
    assert connection.lost.done()


async def test_a_refused_subscription_fails_who_waits_for_it() -> None:
    subscriptions, connection = sharded([])
    asked = asyncio.create_task(subscriptions.subscribe("a"))
    await asyncio.sleep(0)
    subscriptions.on_push(hiredis.ReplyError("MOVED 1 127.0.0.1:7000"))
    assert connection.lost.done()
    with pytest.raises(StoreUnavailable, match="refuses a subscription"):
        await asked


async def test_a_channel_that_is_given_up_fails_who_waits_for_it() -> None:
    subscriptions, _ = sharded([])
    asked = asyncio.create_task(subscriptions.subscribe("a"))
    await asyncio.sleep(0)
    subscriptions.unsubscribe("a")
    with pytest.raises(StoreUnavailable, match="subscription was cancelled"):
        await asked


async def test_what_another_line_heard_is_a_gap_until_it_is_confirmed() -> None:
    gaps: list[str] = []
    subscriptions, _ = sharded(gaps)
    subscriptions.take_over("a")
    assert gaps == []
    subscriptions.on_push([b"ssubscribe", b"a", 1])
    assert gaps == ["over"]
