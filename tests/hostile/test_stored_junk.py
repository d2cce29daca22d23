"""What somebody else wrote under our names in Redis: the polls end, the log says it once, the rest is delivered."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from shared.core.lifecycle import State
from shared.core.record import BadRecord, Claim
from shared.store.contract import LogEntry
from shared.store.one_server import RedisStore
from shared.store.schema import Keys
from tests.app_bench import AppBench
from tests.redis_server import RedisServer
from tests.waiting import until
from tests.worker_bench import OWNER, session
from workers.samples.live import Ending

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

KEY = session().key(1)
NAME = Keys("gw").sample(KEY)
LOG = Keys("gw").log(KEY.session_key, KEY.clone_id)
CLAIM = Claim(OWNER, 1, 1, b"d" * 16)


class Listener:
    def on_announcement(self, session_key: str, seq_ids: Sequence[int]) -> None: ...

    def on_gap(self) -> None: ...

    def on_control(self, message: bytes) -> None: ...


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    server = RedisServer()
    yield server
    server.stop()


@pytest.fixture
async def store(redis: RedisServer) -> AsyncIterator[RedisStore]:
    redis.command("FLUSHALL")
    store = RedisStore(redis.url)
    await store.open(Listener(), OWNER)
    yield store
    await store.close()


@pytest.mark.parametrize(
    "written",
    [
        ("SET", NAME, "x"),
        ("SET", NAME, "R" * 39),
        ("SET", NAME, "?" * 60),
        ("HSET", NAME, "a", "b"),
        ("RPUSH", NAME, "a"),
        ("SADD", NAME, "a"),
    ],
    ids=["short", "cut", "no state", "a hash", "a list", "a set"],
)
async def test_a_record_that_no_gateway_wrote_has_one_error(
    redis: RedisServer, store: RedisStore, written: tuple[str, ...]
) -> None:
    redis.command(*written)
    with pytest.raises(BadRecord):
        await store.read(KEY)
    assert await store.read_header(KEY) is None


async def test_a_line_of_junk_hides_no_other(redis: RedisServer, store: RedisStore) -> None:
    await store.begin(KEY, CLAIM)
    await store.settle(KEY, CLAIM, State.READY, b"result", ttl_s=60.0, now_ms=1)
    redis.command("RPUSH", LOG, "junk")
    redis.command("RPUSH", LOG, "F 7 8 9")
    page = await store.read_log(KEY.session_key, KEY.clone_id, 0, limit=10)
    assert LogEntry(KEY.seq_id, True, 6) in page.entries
    assert LogEntry(7, True, 8) in page.entries
    assert page.unreadable == 1


async def test_polls_for_what_cannot_be_read_end_with_410_and_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = await AppBench().open()
    promised = (await bench.asample()).json["request_id"]
    await until(lambda: bench.executor.started, "the sample to run")
    bench.executor.finish(KEY, Ending(State.READY, b"result"))
    assert (await bench.retrieve(promised)).status == 200

    async def read(_: object) -> None:
        raise BadRecord("not a sample record: 7 bytes")

    monkeypatch.setattr(bench.store, "read", read)
    answered = await asyncio.gather(*(bench.retrieve(promised) for _ in range(5)))
    assert {one.status for one in answered} == {410}
    assert len([record for record in caplog.records if "no gateway wrote" in record.message]) == 1
    await bench.close()
