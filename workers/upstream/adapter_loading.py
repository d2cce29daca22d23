"""Load one adapter into one upstream. Of all workers of all hosts, one at a time does it.

    look     does the upstream list it? then it is done
    lock     (adapter, upstream) in the store, with a lease; a worker that has to wait looks again meanwhile
    load     POST /v1/load_lora_adapter; "already loaded" counts as loaded
    look     samples go by what the upstream lists now

While the store is down nobody waits for a lock: loading twice does no harm, since vLLM refuses the second time.
"""

from __future__ import annotations

import asyncio
import logging
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import msgspec

from shared.core.errors import StoreError
from shared.core.faults import Fault, FaultClass, classify_load

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from shared.core.adapters import Adapter
    from shared.counters import Counters
    from shared.store.contract import Store
    from workers.upstream.forwarder import Forwarder
    from workers.upstream.pool import UpstreamPool
    from workers.upstream.upstream import Upstream

log = logging.getLogger(__name__)

# Enough for gigabytes over a network file system. An upstream that takes longer hangs.
_LOAD_TIMEOUT_S: Final = 300.0
# A worker that died while it loaded holds the others up for this long.
_LOCK_S: Final = 15.0
_RENEW_EVERY_S: Final = 5.0
_LOOK_EVERY_S: Final = 0.25


class AdapterLoader:
    """Loads adapters into upstreams, under locks in the store."""

    def __init__(
        self,
        pool: UpstreamPool,
        forwarder: Forwarder,
        store: Store,
        counters: Counters,
        owner: str,
        wait_s: float,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Use `wait_s` as the time for which a sample tries again after an upstream refused to load its adapter."""
        self._wait_s = wait_s
        self._pool = pool
        self._forwarder = forwarder
        self._store = store
        self._counters = counters
        self._owner = owner
        self._sleep = sleep

    async def load(self, adapter: Adapter, upstream: Upstream, *, listed_in_vain: bool = False) -> Fault | None:
        """Load an adapter; return None or the fault. `listed_in_vain`: it is listed, but a sample of it was refused."""
        if not listed_in_vain and await self._lists(adapter, upstream):
            return None
        lock = lock_name(adapter, upstream)
        while not await self._take(lock):
            await self._sleep(_LOOK_EVERY_S)
            if await self._lists(adapter, upstream):
                return None
        try:
            fault = await self._load_holding(lock, adapter, upstream)
        finally:
            await self._release(lock)
        if fault is not None:
            self._counters.adapter_loads_failed += 1
        else:
            self._counters.adapter_loads += 1
            log.info("adapter is loaded", extra={"adapter": adapter.name, "upstream": upstream.url})
            await self._lists(adapter, upstream)
        return fault

    async def _lists(self, adapter: Adapter, upstream: Upstream) -> bool:
        await self._pool.learn_from(upstream)
        return self._pool.has(adapter.name, upstream)

    async def _load_holding(self, lock: str, adapter: Adapter, upstream: Upstream) -> Fault | None:
        loading = asyncio.create_task(self._post(adapter, upstream))
        try:
            while not (await asyncio.wait({loading}, timeout=_RENEW_EVERY_S))[0]:
                await self._take(lock)
            return loading.result()
        finally:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)

    async def _post(self, adapter: Adapter, upstream: Upstream) -> Fault | None:
        body = msgspec.json.encode({"lora_name": adapter.name, "lora_path": adapter.directory})
        answer = await self._forwarder.ask(upstream, upstream.load_adapter_url, body, _LOAD_TIMEOUT_S)
        if isinstance(answer, Fault):
            if answer.upstream_down:
                self._pool.broke(upstream)
            # No sample was executed, whatever became of this request.
            return Fault(FaultClass.NEVER_EXECUTED, f"adapter {adapter.path}: {answer.message}")
        return classify_load(*answer, adapter.path, self._wait_s)

    async def _take(self, lock: str) -> bool:
        try:
            return await self._store.take_lock(lock, self._owner, ttl_s=_LOCK_S)
        except StoreError:
            return True

    async def _release(self, lock: str) -> None:
        try:
            await self._store.release_lock(lock, self._owner)
        except StoreError as error:
            log.debug("the lock is left to expire", extra={"error": str(error)})


def lock_name(adapter: Adapter, upstream: Upstream) -> str:
    """Return the lock's name: a hash, since neither a client's text nor an address belongs into a store key."""
    return blake2b(f"{adapter.name}\0{upstream.url}".encode(), digest_size=16).hexdigest()
