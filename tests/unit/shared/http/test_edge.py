"""What the connections of one worker share: the wait for their end."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

from shared.http.edge import Edge
from shared.http.head import HttpLimits


async def test_waits_until_the_last_connection_is_closed() -> None:
    edge = Edge(HttpLimits())
    first, second = Mock(), Mock()
    edge.open |= {first, second}
    waiting = asyncio.create_task(edge.wait_all_closed(60.0))
    await asyncio.sleep(0)
    edge.forget(first)
    await asyncio.sleep(0)
    assert not waiting.done()
    edge.forget(second)
    await waiting


async def test_an_edge_without_connections_waits_for_none() -> None:
    async with asyncio.timeout(30.0):
        await Edge(HttpLimits()).wait_all_closed(60.0)


async def test_a_connection_that_nobody_closes_is_not_waited_for_for_ever() -> None:
    edge = Edge(HttpLimits())
    edge.open.add(Mock())
    await edge.wait_all_closed(0.01)
    assert edge.open
