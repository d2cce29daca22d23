"""The upstreams that this worker uses: those of the flags, until an operator publishes a list in the store.

A worker reads the list with every renewal of its lease, when somebody publishes one, and when an upstream breaks, which
may have been restarted elsewhere. Workers that know the list write it again to a store that lost it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from shared.core.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shared.core.upstream_list import UpstreamList
    from shared.store.contract import Store
    from workers.upstream.pool import UpstreamPool

log = logging.getLogger(__name__)

# A server that dies fails a thousand samples within milliseconds; they all share one look.
_LOOK_AGAIN_AFTER_S: Final = 0.5


class PublishedUpstreams:
    """Follow the published list of upstreams."""

    def __init__(
        self,
        store: Store,
        pool: UpstreamPool,
        of_flags: Sequence[str],
        look_again_after_s: float = _LOOK_AGAIN_AFTER_S,
    ) -> None:
        self._store = store
        self._pool = pool
        self._of_flags = tuple(of_flags)
        self._known: UpstreamList | None = None
        self._look_again_after_s = look_again_after_s

    def look(self) -> None:
        """Make `run` read the published list soon; however often this is called, it reads once."""
        self._pool.broken.set()

    async def run(self) -> None:
        """Read the list whenever an upstream broke, or after `look`, until cancelled."""
        while True:
            await self._pool.broken.wait()
            self._pool.broken.clear()
            try:
                await self.sync()
            except StoreError as error:
                # The next renewal of the lease looks again.
                log.debug("the list of upstreams cannot be read", extra={"error": str(error)})
            await asyncio.sleep(self._look_again_after_s)

    async def sync(self) -> None:
        """Follow the published list, and write ours to a store with none or an older one. Raises `StoreError`."""
        known = self._known
        found = await (self._store.read_upstreams() if known is None else self._store.offer_upstreams(known))
        # Two calls may overlap, and the older answer may come second.
        if found is None or found == self._known or (self._known is not None and found.version < self._known.version):
            return
        if found.urls:
            log.info("the published list replaces the --upstream flags", extra={"upstreams": found.urls})
        elif self._known is not None:
            log.info("the published list is gone; the --upstream flags apply", extra={"upstreams": self._of_flags})
        self._known = found
        self._pool.replace(found.urls or self._of_flags)
