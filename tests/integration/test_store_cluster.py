"""The store on a cluster: crash points between its steps, a lost node, a failover, a slot that moves."""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING

import pytest

from gateway.commands import findings
from gateway.supervision.backing import RedisBacking
from shared.config import Settings
from shared.core.errors import StartError, StoreRefused, StoreUnavailable
from shared.core.lifecycle import State
from shared.core.model import SampleKey
from shared.core.record import Claim
from shared.redis.cluster import slot_of
from shared.store import cluster_scripts
from shared.store.cluster import ClusterStore
from shared.store.contract import LogEntry, Settled
from shared.store.one_server import RedisStore
from shared.store.schema import Keys, member
from tests.contract.conftest import Heard
from tests.integration.store_calls import CLAIM, OWNER, TTL_S, in_the_end
from tests.redis_cluster import RedisCluster

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from tests.redis_server import RedisServer

DEAD, REAPER = "dead-00000000000", "reaper-000000000"
DEADS_CLAIM = Claim(DEAD, 1, 1, bytes(16))
NOW_MS = 1_700_000_000_000
KEYS = Keys("gw")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    made = RedisCluster(replicated=True)
    yield made
    made.stop()


@pytest.fixture
async def store(cluster: RedisCluster, heard: Heard) -> AsyncIterator[ClusterStore]:
    made = ClusterStore(cluster.url, rng=Random(1))
    await made.open(heard, OWNER)
    yield made
    await made.close()


async def settle(store: ClusterStore, key: SampleKey, claim: Claim = CLAIM) -> Settled:
    return await store.settle(key, claim, State.READY, b"result", ttl_s=TTL_S, now_ms=NOW_MS)


async def die_before(store: ClusterStore, script: str, key: SampleKey, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settle, and die where the named step would begin."""
    run, call = store._commands.run, store._commands.call

    async def dying_run(wanted: object, *rest: object) -> object:
        if wanted is getattr(cluster_scripts, script, None):
            raise StoreUnavailable("the worker died", maybe_done=False)
        return await run(wanted, *rest)  # type: ignore[arg-type]

    async def dying_call(*words: object) -> object:
        if words[0] == script:
            raise StoreUnavailable("the worker died", maybe_done=False)
        return await call(*words)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(store._commands, "run", dying_run)
        patch.setattr(store._commands, "call", dying_call)
        with pytest.raises(StoreUnavailable):
            await settle(store, key, DEADS_CLAIM)


@pytest.mark.parametrize("step", ["LOG", "SREM"])
async def test_a_half_done_settling_is_finished_by_the_reaper(
    store: ClusterStore, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record is written and its owner dead: it is logged once, announced, and never ORPHANED."""
    key = SampleKey(f"half-{step}", 1)
    await store.begin(key, DEADS_CLAIM)
    await die_before(store, step, key, monkeypatch)
    assert await store.reap(DEAD, ttl_s=TTL_S, now_ms=NOW_MS) == [key]
    assert await store.reap(DEAD, ttl_s=TTL_S, now_ms=NOW_MS) == []
    page = await store.read_log(key.session_key, 0, 0, limit=10)
    assert page.entries == [LogEntry(1, True, len(b"result"))]
    record = await store.read(key)
    assert record is not None and record.header.state is State.READY


@pytest.mark.parametrize("step", ["LOG", "SREM"])
async def test_a_half_done_settling_is_finished_by_repeating_it(
    store: ClusterStore, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = SampleKey(f"again-{step}", 1)
    await store.begin(key, DEADS_CLAIM)
    await die_before(store, step, key, monkeypatch)
    # A duplicate submission meanwhile takes no entry away from the reaper.
    assert await store.begin(key, DEADS_CLAIM) is not None
    assert await store._commands.call("SISMEMBER", KEYS.open_set(DEAD), member(key)) == 1
    assert await settle(store, key, DEADS_CLAIM) is Settled.REPEATED
    assert len((await store.read_log(key.session_key, 0, 0, limit=10)).entries) == 1
    assert await store.reap(DEAD, ttl_s=TTL_S, now_ms=NOW_MS) == []


async def test_a_lost_log_is_written_again_by_the_refill(store: ClusterStore) -> None:
    """C7: a shard that lost its data has lost logs whose records are on others, where the refill is refused."""
    key = SampleKey("lostlog", 1)
    await store.begin(key, CLAIM)
    await settle(store, key)
    await store._commands.call("DEL", KEYS.log("lostlog", 0))
    orphaned = await store.settle(key, CLAIM, State.ORPHANED, b"", ttl_s=TTL_S, now_ms=NOW_MS)
    assert orphaned is Settled.REFUSED
    page = await store.read_log("lostlog", 0, 0, limit=10)
    assert page.entries == [LogEntry(1, True, len(b"result"))]


async def test_a_node_alone_is_refused_as_a_single_server(cluster: RedisCluster) -> None:
    store = RedisStore(f"redis://127.0.0.1:{cluster.masters[0].port}")
    with pytest.raises(StoreRefused, match=r"use redis\+cluster://"):
        await store.open(Heard(), OWNER)
    await store.close()


async def test_the_supervisor_looks_at_every_master(cluster: RedisCluster, tmp_path: Path) -> None:
    """C5: one evicting shard is enough to lose results."""
    backing = RedisBacking(Settings(redis_url=cluster.url), tmp_path, 0)
    for node in cluster.masters:
        ok(node, "CONFIG", "SET", "maxmemory", "100mb")
    assert await backing.open() == cluster.url
    assert backing.info is not None
    assert (backing.info.mode, backing.info.max_bytes) == ("cluster", 300 * 1024 * 1024)
    assert {finding.verdict for finding in findings.redis(backing.info, "there")} == {findings.Verdict.OK}
    await backing.close()
    ok(cluster.masters[2], "CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    with pytest.raises(StartError, match="maxmemory-policy allkeys-lru"):
        await RedisBacking(Settings(redis_url=cluster.url), tmp_path, 0).open()
    ok(cluster.masters[2], "CONFIG", "SET", "maxmemory-policy", "noeviction")


async def test_a_slot_that_moves_takes_its_keys_and_channels_along(
    cluster: RedisCluster, store: ClusterStore, heard: Heard
) -> None:
    """ASK while it moves, MOVED afterwards; watchers hear messages of the new node."""
    session = "moving"
    channel = KEYS.announcement(session)
    slot = slot_of(channel)
    source = cluster.master_of(channel)
    target = next(node for node in cluster.masters if node is not source)
    await store.reserve_clone(session, 1)
    await store.watch(session)
    source_id, target_id = node_id(source), node_id(target)
    ok(target, "CLUSTER", "SETSLOT", str(slot), "IMPORTING", source_id)
    ok(source, "CLUSTER", "SETSLOT", str(slot), "MIGRATING", target_id)
    ok(source, "MIGRATE", "127.0.0.1", str(target.port), KEYS.clones(session), "0", "5000")
    assert await in_the_end(lambda: store.reserve_clone(session, 1)) is False, "asked at the new node"
    assert (await store.read_log(session, 0, 0, limit=1)).entries == []
    for node in (target, source):
        ok(node, "CLUSTER", "SETSLOT", str(slot), "NODE", target_id)
    assert await in_the_end(lambda: store.reserve_clone(session, 1)) is False
    await heard.until(lambda heard: heard.gaps >= 1)
    store.announce(session, 5)
    await heard.until(lambda heard: heard.announced == [(session, 5)])


async def test_a_failover_is_survived_and_counts_as_a_restart(
    cluster: RedisCluster, store: ClusterStore, heard: Heard
) -> None:
    """C3: a master is killed and its replica takes over: pending samples settle, watchers hear messages again."""
    keys = [SampleKey("session", number) for number in range(60)]
    await asyncio.gather(*(in_the_end(lambda key=key: store.begin(key, CLAIM)) for key in keys))  # type: ignore[misc]
    await store.watch("session")
    restarted_s = store.restarted_s
    assert restarted_s is None
    gaps_before = heard.gaps
    cluster.master_of(KEYS.announcement("session")).kill()
    outcomes = await asyncio.gather(*(in_the_end(lambda key=key: settle(store, key)) for key in keys))  # type: ignore[misc]
    assert set(outcomes) <= {Settled.WRITTEN, Settled.REPEATED, Settled.RESTORED}
    await heard.until(lambda heard: heard.gaps > gaps_before)
    assert store.restarted_s is not None
    assert store.connected_since_s is not None
    store.announce("session", 3)
    await heard.until(lambda heard: ("session", 3) in heard.announced)
    page = await store.read_log("session", 0, 0, limit=1000)
    assert {entry.seq_id for entry in page.entries} == {key.seq_id for key in keys}


async def test_a_lost_node_takes_only_its_slots_and_heals(heard: Heard) -> None:
    """Without a replica, keys on the node are unavailable and others work; restarted empty, it is used again."""
    cluster = RedisCluster()
    store = ClusterStore(cluster.url, rng=Random(1))
    await store.open(heard, OWNER)
    keys = [SampleKey("session", number) for number in range(30)]
    lost = cluster.masters[2]
    ours = [key for key in keys if cluster.master_of(KEYS.sample(key)) is lost]
    others = [key for key in keys if key not in ours]
    lost.kill()
    for key in ours:
        with pytest.raises(StoreUnavailable):
            await store.read(key)
    for key in others:
        assert await store.read(key) is None
    assert store.connected_since_s is None
    lost.restart()
    assert await in_the_end(lambda: store.read(ours[0])) is None
    cluster.wait_until_whole()
    assert await in_the_end(lambda: store.begin(ours[0], CLAIM)) is None
    assert store.restarted_s is not None
    await store.close()
    cluster.stop()


def node_id(node: RedisServer) -> str:
    return node.command("CLUSTER", "MYID").split(b"\r\n")[1].decode()


def ok(node: RedisServer, *words: str) -> None:
    assert not node.command(*words).startswith(b"-"), words
