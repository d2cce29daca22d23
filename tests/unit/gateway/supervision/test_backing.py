from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

import pytest

from gateway.supervision import backing as b
from shared.config import Settings
from shared.core.errors import StartError, StoreRefused, StoreUnavailable
from shared.core.model import SampleKey
from shared.core.roll_call import gone_message
from shared.store.contract import Store, StoreInfo

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

INFO = StoreInfo("standalone", "9.1", 10, 100, "noeviction")
URL = "redis://:hunter2@h:6379/0"


class FakeStore:
    """A store without a server; `failures` are raised by the next calls, in order."""

    def __init__(self, *failures: Exception, info: StoreInfo = INFO, open_samples: Sequence[SampleKey] = ()) -> None:
        self.failures = list(failures)
        self.answer = info
        self.open_samples = list(open_samples)
        self.announced: list[tuple[str, int]] = []
        self.closed = False
        self.struck_off: list[str] = []
        self.broadcasts: list[bytes] = []

    def _fail(self) -> None:
        if self.failures:
            raise self.failures.pop(0)

    async def open(self, listener: object, owner: str) -> None:
        self._fail()

    async def info(self) -> StoreInfo:
        self._fail()
        return self.answer

    async def leave_roll(self, owner: str) -> None:
        self.struck_off.append(owner)

    async def broadcast(self, message: bytes) -> None:
        self.broadcasts.append(message)

    async def reap(self, owner: str, *, ttl_s: float, now_ms: int, limit: int = 2) -> list[SampleKey]:
        self._fail()
        page, self.open_samples = self.open_samples[:limit], self.open_samples[limit:]
        return page

    def announce(self, session_key: str, seq_id: int) -> None:
        self.announced.append((session_key, seq_id))

    async def close(self) -> None:
        self.closed = True


def backed_by(store: FakeStore, tmp_path: Path, lease_s: float = 30.0) -> b.RedisBacking:
    settings = Settings(redis_url=URL, lease_s=lease_s)
    return b.RedisBacking(settings, tmp_path, 1 << 30, lambda url, key_prefix: cast("Store", store), retry_s=0.001)


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl", "volatile-lfu", "allkeys-random"])
def test_a_policy_that_drops_results_is_refused(policy: str) -> None:
    """C5"""
    refusal = b.policy_refusal(replace(INFO, policy=policy))
    assert refusal is not None
    assert policy in refusal
    assert "noeviction" in refusal


@pytest.mark.parametrize("policy", ["noeviction", ""])
def test_other_policies_are_taken(policy: str) -> None:
    assert b.policy_refusal(replace(INFO, policy=policy)) is None


async def test_opened_and_described_without_the_password(tmp_path: Path) -> None:
    store = FakeStore()
    backing = backed_by(store, tmp_path)
    assert await backing.open() == URL
    assert backing.info == INFO
    assert backing.description == "redis://:***@h:6379/0"
    await backing.close()
    assert store.closed


def test_the_embedded_server_is_described_by_its_size(tmp_path: Path) -> None:
    assert b.RedisBacking(Settings(), tmp_path, 3 << 30).description == ("the embedded Redis (3.0 GiB, in memory only)")


@pytest.mark.parametrize(
    ("store", "message"),
    [
        (FakeStore(StoreUnavailable("refused", maybe_done=False)), "cannot be used: refused"),
        (
            FakeStore(StoreUnavailable("Redis at redis://h:6379/0 cannot be reached", maybe_done=False)),
            "^Redis at redis://h:6379/0 cannot be reached$",
        ),
        (FakeStore(StoreRefused("WRONGPASS")), "cannot be used: WRONGPASS"),
        (FakeStore(info=replace(INFO, policy="allkeys-lru")), "maxmemory-policy allkeys-lru"),
    ],
)
async def test_what_cannot_be_used_stops_the_start(store: FakeStore, message: str, tmp_path: Path) -> None:
    """B10, C5"""
    with pytest.raises(StartError, match=message) as refusal:
        await backed_by(store, tmp_path).open()
    assert store.closed
    assert "hunter2" not in str(refusal.value)


async def test_reaping_goes_on_to_the_end_and_over_an_outage(tmp_path: Path) -> None:
    keys = [SampleKey("s", seq_id) for seq_id in range(5)]
    store = FakeStore(open_samples=keys)
    backing = backed_by(store, tmp_path)
    await backing.open()
    store.failures = [StoreUnavailable("away", maybe_done=True), StoreUnavailable("away", maybe_done=True)]
    assert await backing.reap("dead") == 5
    assert store.announced == [("s", seq_id) for seq_id in range(5)]
    assert store.struck_off == ["dead"]
    assert store.broadcasts == [gone_message("dead")]


async def test_reaping_gives_up_when_leases_do_it(tmp_path: Path) -> None:
    store = FakeStore()
    backing = backed_by(store, tmp_path, lease_s=-1.0)
    await backing.open()
    store.failures = [StoreUnavailable("away", maybe_done=True)]
    assert await backing.reap("dead") == 0
