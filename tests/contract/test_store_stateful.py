"""Random lives of samples under two owners that crash, with lost replies, wipes and jumps of the clock.

The store under test goes through the same steps as a pure model, and is compared with it after each.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from shared.core.lifecycle import SETTLED, SETTLING, State
from shared.core.model import SampleKey
from shared.core.record import Claim
from tests.contract.conftest import Heard
from tests.contract.store_model import Model
from tests.contract.store_worlds import MemoryWorld, RedisWorld
from tests.waiting import DEADLINE_S

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable

    from shared.core.record import Header, Record
    from shared.store.contract import LogPage, Store
    from tests.contract.store_model import LogName, Sample
    from tests.contract.store_worlds import World
    from tests.redis_server import RedisServer

# The time left of a record is never within 10 s of 0: all jumps are multiples of 20, the times to live are not. So the
# few seconds by which a real server's clock advances do not matter.
UNDELIVERED_S, RETRIEVED_S, ACKED_S, LEASE_S = 3610.0, 310.0, 30.0, 30.0
TOLERANCE_S: Final = 9.0
JUMPS_S: Final = (20, 20, 300, 3400, 4000)
START_MS: Final = 1_700_000_000_000
# Two sessions, two clones, and neighbouring numbers that a double cannot distinguish.
KEYS: Final = [
    SampleKey("s", 0),
    SampleKey("s", 1),
    SampleKey("s", 2**53),
    SampleKey("s", 2**53 + 1),
    SampleKey("t", 1),
]
LOGS: Final = sorted({(key.session_key, key.clone_id) for key in KEYS})
ENDINGS: Final = sorted(SETTLING, key=lambda state: state.name)
SLOTS: Final = ("alice", "bob")

# CI runs the same examples every time; a manual run tries others, and prints how to repeat a failure.
settings.register_profile("stateful-ci", derandomize=True, print_blob=True)
settings.register_profile("stateful", print_blob=True)
EXAMPLES: Final = settings(
    settings.get_profile("stateful-ci" if os.environ.get("CI") else "stateful"),
    max_examples=150,
    # Shrinking takes minutes; add Phase.shrink when there is a failure to study.
    phases=[Phase.generate],
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

keys = st.sampled_from(KEYS)
some_keys = st.lists(keys, min_size=2, max_size=4, unique=True)
slots = st.sampled_from(SLOTS)
endings = st.sampled_from([State.READY, State.READY, *ENDINGS])
# True if the reply was lost, so that the caller repeats the call.
lost = st.booleans()
# The number of samples in a burst: enough to trim a log.
BURST: Final = 33
_REMEMBERED: Final = 3


@dataclass(frozen=True)
class Cursor:
    """A cursor that a client remembers, and its position in the log of that epoch."""

    value: int = 0
    epoch: int | None = None
    place: int = 0


class StoreMachine(RuleBasedStateMachine):
    """The rules. `World` is the server; a slot holds the store of the instance that runs there now."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.model = Model()
        self.loop = asyncio.new_event_loop()
        self.stores: dict[str, Store] = {}
        self.owners: dict[str, str] = {}
        self.claims: list[tuple[SampleKey, Claim]] = []
        self.born = 0
        self.reads = 0
        self.wall_ms = START_MS
        self.cursors: dict[LogName, list[Cursor]] = {name: [Cursor()] for name in LOGS}
        self.next_seq_id = 1000
        # The first terminal state of every life, and when the life ends.
        self.first_ending: dict[int, State] = {}
        self.earliest_end_s: dict[int, float] = {}

    def run(self, call: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(call, DEADLINE_S))

    def teardown(self) -> None:
        try:
            if self.stores:
                self.everything_ends_up_in_its_log()
        finally:
            for store in self.stores.values():
                self.run(store.close())
            self.loop.close()

    @initialize()
    def start(self) -> None:
        for slot in SLOTS:
            self.start_instance(slot)

    def start_instance(self, slot: str) -> None:
        self.born += 1
        self.owners[slot] = f"{slot:_<8}{self.born:08}"
        self.stores[slot] = self.world.make_store()
        self.run(self.stores[slot].open(Heard(), self.owners[slot]))
        self.renew(slot)

    # -- the life of samples

    @rule(slot=slots, key=keys, attempt=st.sampled_from([1, 1, 1, 2]), paused=st.booleans(), again=lost)
    def begin(self, slot: str, key: SampleKey, attempt: int, paused: bool, again: bool) -> None:
        """The owner also notes whether an upstream takes the sample."""
        owner, store = self.owners[slot], self.stores[slot]
        claim = Claim(owner, attempt, attempt, owner.encode())
        self.claims.append((key, claim))
        for _ in range(1 + again):
            found = self.run(store.begin(key, claim))
            assert found == self.model.begin(key, claim)
        self.run(self.mark_paused(store, key, claim, paused))
        self.model.mark_paused(key, claim, paused=paused)

    async def mark_paused(self, store: Store, key: SampleKey, claim: Claim, paused: bool) -> None:
        """Return when it is done: the same store answers a later call later."""
        store.mark_paused(key, claim, paused=paused)
        await store.read_header(key)

    @rule(slot=slots, pick=st.integers(0, 99), state=endings, again=lost)
    def settle_by_its_owner(self, slot: str, pick: int, state: State, again: bool) -> None:
        """Mostly a running sample; now and then one that has ended, as if that reply was lost."""
        mine = sorted(self.model.pending()) if pick < 70 else sorted(self.model.samples)
        if mine:
            key = mine[pick % len(mine)]
            self.settle(slot, key, self.model.samples[key].header.claim, state, again)

    @rule(slot=slots, key=keys, pick=st.integers(0, 99), state=endings, again=lost)
    def settle_by_any_claim(self, slot: str, key: SampleKey, pick: int, state: State, again: bool) -> None:
        """A late `settle` of a dead instance, or of a lost race, may come at any time."""
        claims = [claim for claimed, claim in self.claims if claimed == key]
        if claims:
            self.settle(slot, key, claims[-1 - pick % len(claims)], state, again)

    def settle(self, slot: str, key: SampleKey, claim: Claim, state: State, again: bool) -> None:
        for number in range(1 + again):
            payload = bytes([65 + number]) * 7
            how: dict[str, Any] = {"ttl_s": UNDELIVERED_S, "now_ms": self.wall_ms}
            settled = self.run(self.stores[slot].settle(key, claim, state, payload, **how))
            assert settled is self.model.settle(key, claim, state, payload, **how)

    @rule(slot=slots, some=some_keys, acknowledged=st.booleans(), again=lost)
    def deliver(self, slot: str, some: list[SampleKey], acknowledged: bool, again: bool) -> None:
        store, ttl_s = self.stores[slot], ACKED_S if acknowledged else RETRIEVED_S
        for _ in range(1 + again):
            started = self.run((store.acknowledge if acknowledged else store.mark_retrieved)(some, ttl_s=ttl_s))
            assert started == self.model.start_clocks(some, ttl_s, acknowledged=acknowledged)

    # -- rarer events, which would take too much time as rules of their own

    @rule(
        slot=slots,
        what=st.sampled_from(
            ["burst", "burst", "crash", "crash_half_way", "wipe", "leave", "renew", "reap", "reap_one_by_one"]
        ),
        key=keys,
    )
    def trouble(self, slot: str, what: str, key: SampleKey) -> None:
        match what:
            case "burst":
                self.complete_many(slot)
            case "crash":
                self.crash(slot)
            case "crash_half_way":
                self.crash_half_way(slot, key)
            case "wipe":
                self.world.wipe()
                self.model.wipe()
            case "leave":
                self.run(self.stores[slot].release_lease(self.owners[slot]))
                self.model.release(self.owners[slot])
            case "renew":
                self.renew(slot)
            case "reap" | "reap_one_by_one":
                self.reap_the_lapsed(slot, 500 if what == "reap" else 1)

    @rule(seconds=st.sampled_from(JUMPS_S), off_s=st.sampled_from([0, 0, -5000, 5000]))
    def time_passes(self, seconds: int, off_s: int) -> None:
        """`off_s` is the error of the wall clock, as of another host; only the ages of log entries depend on it."""
        self.world.jump(seconds)
        self.model.jump(seconds)
        self.wall_ms += (seconds + off_s) * 1000

    def crash(self, slot: str) -> None:
        """Everything it had begun stays as it is until it is reaped."""
        self.run(self.stores[slot].close())
        self.start_instance(slot)

    def crash_half_way(self, slot: str, key: SampleKey) -> None:
        """It had only entered a sample of another owner; its supervisor reaps at once."""
        dead = self.owners[slot]
        others = self.model.pending() - self.model.pending(dead)
        key = min(others, default=key)
        self.world.enter_open_set(dead, key)
        self.model.open_sets[dead].add(key)
        self.crash(slot)
        self.reap(slot, dead)

    def complete_many(self, slot: str) -> None:
        store, owner = self.stores[slot], self.owners[slot]
        claim = Claim(owner, 1, 1, bytes(16))
        how: dict[str, Any] = {"ttl_s": UNDELIVERED_S, "now_ms": self.wall_ms}
        burst = [SampleKey("s", self.next_seq_id + number) for number in range(BURST)]
        self.next_seq_id += BURST
        self.run(_all(store.begin(key, claim) for key in burst))
        self.run(_all(store.settle(key, claim, State.READY, b"burst", **how) for key in burst))
        for key in burst:
            self.model.begin(key, claim)
            self.model.settle(key, claim, State.READY, b"burst", **how)

    def renew(self, slot: str) -> None:
        owner = self.owners[slot]
        held = self.run(self.stores[slot].renew_lease(owner, ttl_s=LEASE_S))
        assert held is self.model.renew(owner, LEASE_S)

    def reap_the_lapsed(self, slot: str, limit: int) -> None:
        """One of them may be alive and was only slow."""
        for owner in sorted(self.model.lapsed()):
            self.reap(slot, owner, limit)

    def reap(self, slot: str, owner: str, limit: int = 500) -> None:
        runs = len(self.model.pending(owner))
        found = self.run(self.stores[slot].reap(owner, ttl_s=UNDELIVERED_S, now_ms=self.wall_ms, limit=limit))
        assert len(found) == min(runs, limit)
        left = self.world.peek([owner]).open_sets[owner]
        self.model.reaped(owner, found, left, ttl_s=UNDELIVERED_S, now_ms=self.wall_ms)

    # -- invariants, checked after every step

    def next_reader(self) -> list[Store]:
        """Return one of the stores, in turn, since they must not differ; None before the start."""
        self.reads += 1
        return list(self.stores.values())[self.reads % 2 :][:1]

    @invariant()
    def the_store_says_what_the_model_says(self) -> None:
        for store in self.next_reader():
            records = self.run(_read_all(store))
            assert {key: _plain(record) for key, record in records.items()} == {
                key: (found.header, found.payload) for key, found in self.model.samples.items() if key in KEYS
            }
            assert len(self.run(store.unread(KEYS))) == self.model.unread(KEYS)
            assert set(self.run(store.lapsed_owners())) == self.model.lapsed()

    @invariant()
    def lives_and_open_sets_are_right(self) -> None:
        """A PENDING record does not expire and is in its owner's open set; all others expire on time."""
        peek = self.world.peek(self.model.open_sets)
        assert peek.left_s.keys() == self.model.samples.keys()
        for key, left_s in peek.left_s.items():
            self.check_life(self.model.samples[key], left_s)
        for owner, left in peek.open_sets.items():
            assert left == self.model.open_sets[owner] >= self.model.pending(owner)

    def check_life(self, found: Sample, left_s: float | None) -> None:
        state = found.header.state
        if state is State.PENDING:
            assert left_s is None and not found.payload
            return
        assert left_s is not None and found.expires_s is not None and state in SETTLED
        end_s = self.model.now_s + left_s
        assert abs(end_s - found.expires_s) < TOLERANCE_S
        # A clock is never extended; the first terminal state stays, except that READY becomes RETRIEVED.
        earliest_s = self.earliest_end_s.setdefault(found.life, end_s)
        self.earliest_end_s[found.life] = min(earliest_s, end_s)
        assert end_s < earliest_s + TOLERANCE_S
        reached = State.READY if state is State.RETRIEVED else state
        assert self.first_ending.setdefault(found.life, reached) is reached

    @invariant()
    def clients_go_on_where_they_were(self) -> None:
        """Read with every cursor that clients remember, as often as they ask."""
        asked = [(name, cursor, limit) for name in LOGS for cursor in self.cursors[name] for limit in (1, 1000)]
        for store in self.next_reader():
            pages = self.run(_all(store.read_log(*name, at.value, limit=limit) for name, at, limit in asked))
            for (name, cursor, limit), page in zip(asked, pages, strict=True):
                self.check_page(name, cursor, page, limit)

    def check_page(self, name: LogName, known: Cursor, page: LogPage, limit: int) -> None:
        log = self.model.logs.get(name)
        if log is None:
            assert (page.entries, page.cursor) == ([], 0)
            return
        start = known.place if log.epoch == known.epoch else 0
        if not page.entries:
            assert (start, page.cursor) == (len(log.entries), known.value)
            return
        end = page.cursor % 2**32
        first = end - len(page.entries)
        assert page.entries == [entry for _, entry in log.entries[first:end]]
        assert start <= first <= max(start, log.trimmable)
        assert len(page.entries) == limit or end == len(log.entries)
        assert page.cursor < 2**53
        self.remember(name, Cursor(page.cursor, log.epoch, end))

    def remember(self, name: LogName, cursor: Cursor) -> None:
        """Keep the newest cursors, and always that of a new client."""
        if cursor not in self.cursors[name]:
            self.cursors[name] = [Cursor(), *self.cursors[name][1:], cursor]
            del self.cursors[name][1:-_REMEMBERED]

    def everything_ends_up_in_its_log(self) -> None:
        """When all instances have died and were reaped, nothing is PENDING, and each life was logged once."""
        for owner in sorted(self.model.open_sets):
            self.reap("alice", owner)
        assert not self.model.pending()
        for name, log in self.model.logs.items():
            page = self.run(self.stores["alice"].read_log(*name, 0, limit=1000))
            dropped = [entry.seq_id for _, entry in log.entries[: len(log.entries) - len(page.entries)]]
            assert len(dropped) <= log.trimmable
            told = Counter(dropped + [entry.seq_id for entry in page.entries])
            assert told == Counter(self.model.accepted[name])


async def _all(calls: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    return await asyncio.gather(*calls)


async def _read_all(store: Store) -> dict[SampleKey, Record]:
    records = await asyncio.gather(*map(store.read, KEYS))
    return {key: record for key, record in zip(KEYS, records, strict=True) if record is not None}


def _plain(record: Record) -> tuple[Header, bytes]:
    return record.header, bytes(record.payload)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memory", "redis"])
def test_a_store_keeps_its_contract_whatever_happens(kind: str, redis_server: RedisServer) -> None:
    """Invariants 1 to 6 of the store, A6, C3 and C7 in the small."""

    def machine() -> StoreMachine:
        return StoreMachine(MemoryWorld() if kind == "memory" else RedisWorld(redis_server))

    run_state_machine_as_test(machine, settings=EXAMPLES)  # type: ignore[arg-type] # it takes whatever makes one
