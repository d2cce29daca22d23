"""Where results are kept, as the supervisor sees it: its own connection, the embedded server, and dead workers.

The supervisor holds no samples. It needs the store to refuse a start that could not work, to show it in `/status`, and
to orphan and announce the open samples of a dead worker at once instead of a lease later.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, Protocol

from gateway.machine.kernel import memory_bytes
from gateway.settings.quantities import human_bytes
from gateway.settings.urls import redacted
from gateway.supervision.worker_process import new_instance
from shared.clock import SystemClock
from shared.core.errors import StartError, StoreError
from shared.store.open import make_store
from shared.store.recovery import publish_upstreams, reap

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from gateway.machine.embedded_redis import EmbeddedRedis
    from shared.config import Settings
    from shared.store.contract import Store, StoreInfo

log = logging.getLogger("gateway.backing")

# For /status and /readyz, which people read.
_INFO_EVERY_S: Final = 2.0
# C3: the embedded server is back within 5 s.
_ALIVE_EVERY_S: Final = 0.1
# After a failed command the first pause before the next one.
_FIRST_RETRY_S: Final = 0.1
_LONGEST_RETRY_S: Final = 2.0
# By then the lease has expired, and any worker of any host reaps instead.
_GIVE_UP_LEASES: Final = 2
# Every other eviction policy may drop a result before its client has fetched it.
_HARMLESS_POLICY: Final = "noeviction"
# Of the machine's memory; the rest is for workers and system. Results usually need far less.
_EMBEDDED_SHARE: Final = 4


class Backing(Protocol):
    """A store as the supervisor needs it; tests have one without a server."""

    info: StoreInfo | None  # None while the store does not answer
    lag_ms: float  # time of the last answer

    @property
    def description(self) -> str:
        """Name the place where results are kept, for people and without passwords."""
        ...

    async def open(self) -> str:
        """Connect, and return the URL for the workers. Raises `StartError`."""
        ...

    async def watch(self) -> None:
        """Keep `info` current and the embedded server alive, until cancelled."""
        ...

    async def upstream_list(self, wanted: Sequence[str] | None) -> Sequence[str]:
        """Publish `wanted` unless it is None, and return the published list. Raises `StoreError`."""
        ...

    async def reap(self, owner: str) -> int:
        """Orphan and announce all open samples of a dead worker instance, and return how many there were."""
        ...

    async def close(self) -> None: ...


class NullListener:
    """A store listener that does nothing: the supervisor waits for no sample and accepts no message."""

    def on_announcement(self, session_key: str, seq_ids: Sequence[int]) -> None:
        pass

    def on_gap(self) -> None:
        pass

    def on_control(self, message: bytes) -> None:
        pass


def policy_refusal(info: StoreInfo) -> str | None:
    """Explain why a server with this eviction policy cannot be used, or return None if it can."""
    if info.policy in ("", _HARMLESS_POLICY):
        return None
    return (
        f"Redis has maxmemory-policy {info.policy}, which may drop results that nobody has fetched;"
        " set it to noeviction (CONFIG SET maxmemory-policy noeviction)"
    )


class RedisBacking:
    """The operator's Redis (`--redis-url`), or an embedded one in the run directory.

    `memory_bytes` limits the embedded one. Tests hand in another store and a shorter `retry_s`.
    """

    def __init__(
        self,
        settings: Settings,
        run_dir: Path,
        memory_bytes: int,
        make_store: Callable[[str, str], Store] = make_store,
        retry_s: float = _FIRST_RETRY_S,
    ) -> None:
        self._settings = settings
        self._run_dir = run_dir
        self._memory_bytes = memory_bytes
        self._make_store = make_store
        self._retry_s = retry_s
        self._clock = SystemClock()
        self._embedded: EmbeddedRedis | None = None
        self._store: Store | None = None
        self.info: StoreInfo | None = None
        self.lag_ms = 0.0

    @property
    def description(self) -> str:
        if self._settings.redis_url is not None:
            return redacted(self._settings.redis_url)
        return f"the embedded Redis ({human_bytes(self._memory_bytes)}, in memory only)"

    async def open(self) -> str:
        url = self._settings.redis_url or await self._start_embedded()
        try:
            self._store = await self._connect(url)
        except StartError:
            await self.close()
            raise
        return url

    async def _start_embedded(self) -> str:
        from gateway.machine.embedded_redis import EmbeddedRedis

        self._embedded = EmbeddedRedis(self._run_dir, self._memory_bytes)
        return await self._embedded.start()

    async def _connect(self, url: str) -> Store:
        store = self._make_store(url, self._settings.key_prefix)
        try:
            await store.open(NullListener(), new_instance())
            self.info = await store.info()
        except StoreError as error:
            await store.close()
            text = str(error)
            # Some errors name the server already, without user and password.
            named = text.startswith("Redis at ")
            raise StartError(text if named else f"Redis at {redacted(url)} cannot be used: {text}") from None
        if (refusal := policy_refusal(self.info)) is not None:
            await store.close()
            raise StartError(f"--redis-url: {refusal}")
        return store

    async def watch(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_informed())
            if self._embedded is not None:
                group.create_task(self._keep_alive(self._embedded))

    async def _keep_informed(self) -> None:
        assert self._store is not None
        while True:
            asked_s = self._clock.monotonic_s()
            try:
                self.info = await self._store.info()
                self.lag_ms = (self._clock.monotonic_s() - asked_s) * 1000
            except StoreError:
                self.info = None
            await asyncio.sleep(_INFO_EVERY_S if self.info is not None else self._retry_s)

    async def _keep_alive(self, embedded: EmbeddedRedis) -> None:
        while True:
            await asyncio.sleep(_ALIVE_EVERY_S)
            if embedded.running:
                continue
            log.error("the embedded Redis died; starting an empty one, which the workers refill")
            try:
                await embedded.start()
            except StartError as error:
                log.error("the embedded Redis does not start", extra={"reason": str(error)})
                await asyncio.sleep(_LONGEST_RETRY_S)

    async def upstream_list(self, wanted: Sequence[str] | None) -> Sequence[str]:
        assert self._store is not None
        if wanted is not None:
            return (await publish_upstreams(self._store, wanted, self._clock)).urls
        published = await self._store.read_upstreams()
        return published.urls if published is not None else ()

    async def reap(self, owner: str) -> int:
        deadline_s = self._clock.monotonic_s() + _GIVE_UP_LEASES * self._settings.lease_s
        retry_s = self._retry_s
        assert self._store is not None
        while True:
            try:
                return await reap(self._store, owner, self._settings.undelivered_ttl_s, self._clock)
            except StoreError:
                if self._clock.monotonic_s() > deadline_s:
                    return 0
            await asyncio.sleep(retry_s)
            retry_s = min(retry_s * 2, _LONGEST_RETRY_S)

    async def close(self) -> None:
        if self._store is not None:
            await self._store.close()
        if self._embedded is not None:
            await self._embedded.stop()


def redis_backing(settings: Settings, run_dir: Path) -> RedisBacking:
    memory = settings.redis_memory_bytes or memory_bytes() // _EMBEDDED_SHARE
    return RedisBacking(settings, run_dir, memory)
