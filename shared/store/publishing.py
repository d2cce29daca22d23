"""Publishing the list of upstreams, for whoever an operator asks: a supervisor, on any host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.core.upstream_list import PUBLISHED, UpstreamList, next_version

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shared.clock import Clock
    from shared.store.base import Store


async def publish_upstreams(store: Store, urls: Sequence[str], clock: Clock) -> UpstreamList:
    """Make `urls` the list of all workers of all hosts, and tell them; none at all: each host's flags count again.

    Of two that publish at once, one is the last. Raises `StoreError`.
    """
    while True:
        before = await store.read_upstreams()
        wanted = UpstreamList(next_version(before, clock.wall_ms()), tuple(urls))
        if await store.offer_upstreams(wanted) == wanted:
            await store.broadcast(PUBLISHED)
            return wanted
