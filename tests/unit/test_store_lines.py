"""When a gap in what a worker hears is over."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from shared.store.lines import Subscriptions

if TYPE_CHECKING:
    from shared.store.connection import Connection


class FakeConnection:
    def __init__(self) -> None:
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.sent: list[tuple[str, ...]] = []

    def tell(self, *words: str) -> None:
        self.sent.append(words)


def confirm(subscriptions: Subscriptions, channel: str) -> None:
    subscriptions.on_push([b"subscribe", channel.encode(), 1])


async def subscribed(gaps: list[str], *channels: str) -> Subscriptions:
    """Heard, then lost, then connected anew: every channel waits for its confirmation."""
    subscriptions = Subscriptions(lambda *_: None, lambda: gaps.append("over"))
    first, second = FakeConnection(), FakeConnection()
    subscriptions.on_up(cast("Connection", first))
    asked = [asyncio.create_task(subscriptions.subscribe(channel)) for channel in channels]
    await asyncio.sleep(0)
    for channel in channels:
        confirm(subscriptions, channel)
    await asyncio.gather(*asked)
    first.lost.set_result("cut")
    await asyncio.sleep(0)
    subscriptions.on_up(cast("Connection", second))
    assert set(second.sent[0]) == {"SUBSCRIBE", *channels}
    return subscriptions


async def test_a_gap_is_over_with_the_last_channel() -> None:
    gaps: list[str] = []
    subscriptions = await subscribed(gaps, "a", "b")
    confirm(subscriptions, "a")
    assert gaps == []
    confirm(subscriptions, "b")
    assert gaps == ["over"]


async def test_a_channel_that_is_given_up_does_not_keep_the_gap_open() -> None:
    """C4: a lingering subscription ends just then; the other waiters must hear of the gap all the same."""
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
    subscriptions.on_up(cast("Connection", FakeConnection()))
    asked = asyncio.create_task(subscriptions.subscribe("a"))
    await asyncio.sleep(0)
    confirm(subscriptions, "a")
    await asked
    assert gaps == []
