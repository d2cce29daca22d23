"""Adapters where samples need them: several workers on one store, two simulated vLLMs, real sockets."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from gateway.simulator.config import SimulatorConfig
from gateway.simulator.simulator import Simulator
from shared.clock import ManualClock, SystemClock
from shared.config import Settings
from shared.core import ids, retry
from shared.core.errors import BadRequest, NotFound, Overloaded
from shared.core.faults import Fault
from shared.core.lifecycle import State
from shared.core.model import ModelRef
from shared.core.record import Claim
from shared.counters import Counters
from tests.memory_store import MemoryServer, MemoryStore
from tests.waiting import until
from tests.worker_bench import AWAY, session, spec
from workers.samples.execution import Executor
from workers.samples.live import LiveSample
from workers.samples.quota import Holding
from workers.upstream import adapter_loading, adapters
from workers.upstream.adapter_loading import AdapterLoader, lock_name
from workers.upstream.adapters import Adapters
from workers.upstream.catalogue import Catalogue
from workers.upstream.connector import make_client, make_probe_session
from workers.upstream.forwarder import Forwarder
from workers.upstream.pool import UpstreamPool

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from workers.samples.live import Ending

NAME, LOAD = "{run_id}--{checkpoint}", "/v1/load_lora_adapter"
MODEL = ModelRef(model_path="tinker://run-1/sampler_weights/000100")
HELD = {"kind": "hold", "path": LOAD}


class Worker:
    """One worker's way to the upstreams, on a store that it shares."""

    def __init__(self, server: MemoryServer, urls: list[str], number: int = 0, lora_path: str | None = "") -> None:
        settings = Settings(upstreams=tuple(urls))
        self.owner = f"worker-{number:09}"
        self.store = MemoryStore(server)
        self.client = make_client(settings, None)
        self.questions = make_probe_session(settings, None)
        clock = SystemClock()
        forwarder = Forwarder(self.client, self.questions, clock)
        template = "/adapters/{run_id}/{checkpoint}" if lora_path == "" else lora_path
        self.pool = UpstreamPool(urls, forwarder, Catalogue((), NAME, template), clock)
        self.counters = Counters()
        loader = AdapterLoader(self.pool, forwarder, self.store, self.counters, self.owner, wait_s=60.0)
        self.adapters = Adapters(self.pool, loader, clock, wait_s=60.0)
        self.executor = Executor(
            self.pool,
            self.adapters,
            forwarder,
            self.store,
            self.counters,
            clock,
            retry.Policy(),
            random.Random(7).random,
        )
        self.running: LiveSample | None = None

    async def execute(self, seq_id: int = 1) -> Ending:
        wanted = spec()
        target = await self.adapters.target(MODEL)
        claim = Claim(self.owner, 1, 1, wanted.digest)
        self.running = LiveSample(
            session(), session().key(seq_id), ids.request_id(session(), seq_id), wanted, claim, target, 0, Holding(b"")
        )
        return await self.executor.execute(self.running)

    async def close(self) -> None:
        await self.adapters.close()
        await self.pool.close()
        await self.client.close()
        await self.questions.close()


class Bench:
    def __init__(self, simulators: list[Simulator], stack: AsyncExitStack) -> None:
        self.simulators = simulators
        self.server = MemoryServer(ManualClock(), random.Random(7))
        self._stack = stack

    @property
    def urls(self) -> list[str]:
        return [simulator.url for simulator in self.simulators]

    @property
    def loads(self) -> list[int]:
        return [simulator.stats()["adapter_loads"] for simulator in self.simulators]

    async def worker(self, number: int = 0, urls: list[str] | None = None, lora_path: str | None = "") -> Worker:
        made = Worker(self.server, urls or self.urls, number, lora_path)
        self._stack.push_async_callback(made.close)
        await made.pool.learn_models()
        return made


@asynccontextmanager
async def started(count: int = 2, **config: Any) -> AsyncIterator[Bench]:
    async with AsyncExitStack() as stack:
        simulators = [await stack.enter_async_context(Simulator(SimulatorConfig(**config))) for _ in range(count)]
        yield Bench(simulators, stack)


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_loading, "_LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(adapters, "_FIRST_PAUSE_S", 0.01)


async def test_an_adapter_is_loaded_into_every_upstream_when_it_is_bound() -> None:
    async with started() as bench:
        worker = await bench.worker()
        target = await worker.adapters.bind(MODEL)
        assert (target.upstream_name, target.base_model, target.context_tokens) == (
            "run-1--000100",
            "sim/tiny",
            131_072,
        )
        assert bench.loads == [1, 1]
        for seq_id in range(4):
            assert (await worker.execute(seq_id)).state is State.READY
        assert bench.loads == [1, 1]
        assert (worker.counters.adapter_loads, worker.counters.adapter_loads_failed) == (2, 0)


async def test_of_many_workers_one_loads_and_the_others_wait_for_it() -> None:
    async with started() as bench:
        workers = [await bench.worker(number) for number in range(6)]
        for simulator in bench.simulators:
            simulator.set_faults([HELD])
        binding = [asyncio.create_task(worker.adapters.bind(MODEL)) for worker in workers for _ in range(5)]
        await until(lambda: bench.loads == [1, 1])
        tries = [worker.store.commands for worker in workers]
        # Each of the others looks again, and tries for the lock in vain.
        await until(lambda: sum(w.store.commands > before + 3 for w, before in zip(workers, tries, strict=True)) >= 5)
        assert bench.loads == [1, 1]
        assert not any(task.done() for task in binding)
        for simulator in bench.simulators:
            simulator.set_faults([])
            simulator._released.set()
        names = {target.upstream_name for target in await asyncio.gather(*binding)}
        assert names == {"run-1--000100"}
        assert bench.loads == [1, 1]


async def test_an_adapter_that_somebody_loaded_before_is_not_loaded_again() -> None:
    async with started() as bench:
        first, second = await bench.worker(1), await bench.worker(2)
        await first.adapters.bind(MODEL)
        await second.adapters.bind(MODEL)
        assert bench.loads == [1, 1]


async def test_already_loaded_is_as_good_as_loaded() -> None:
    async with started(1) as bench:
        worker = await bench.worker()
        await worker.adapters.bind(MODEL)
        adapter = worker.pool.catalogue.adapter(MODEL.name)
        (upstream,) = worker.pool.up()
        loader = worker.adapters._loader
        assert await loader.load(adapter, upstream, listed_in_vain=True) is None
        assert bench.loads == [2]


async def test_files_that_come_late_are_waited_for(tmp_path: Path) -> None:
    """A checkpoint on a network file system; polls say that the sample waits."""
    async with started(lora="files") as bench:
        worker = await bench.worker(lora_path=f"{tmp_path}/{{run_id}}/{{checkpoint}}")
        sample = asyncio.create_task(worker.execute())
        await until(lambda: worker.running is not None and "No adapter found" in (worker.running.paused_reason or ""))
        directory = tmp_path / "run-1" / "000100"
        directory.mkdir(parents=True)
        (directory / "adapter_config.json").touch()
        assert (await sample).state is State.READY


async def test_an_adapter_without_files_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "_BIND_RETRIES_S", 0.05)
    async with started(lora="files") as bench:
        worker = await bench.worker(lora_path=f"{tmp_path}/{{run_id}}/{{checkpoint}}")
        with pytest.raises(NotFound, match=r"tinker://run-1/sampler_weights/000100.*No adapter found"):
            await worker.adapters.bind(MODEL)


@pytest.mark.parametrize(
    ("config", "fault", "words"),
    [
        ({"lora": "off"}, [], "--enable-lora"),
        (
            {},
            [{"kind": "status", "status": 500, "path": LOAD, "body": "LoRA rank 16 is greater than max_lora_rank 8."}],
            "rank 16",
        ),
    ],
)
async def test_an_adapter_that_no_upstream_can_load_is_refused_in_its_words(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], fault: list[Any], words: str
) -> None:
    monkeypatch.setattr(adapters, "_BIND_RETRIES_S", 0.05)
    async with started(**config) as bench:
        for simulator in bench.simulators:
            simulator.set_faults(fault)
        worker = await bench.worker()
        with pytest.raises(BadRequest, match=words):
            await worker.adapters.bind(MODEL)


async def test_one_of_two_upstreams_that_cannot_load_it_is_passed_over() -> None:
    async with started() as bench:
        bench.simulators[0].set_faults([{"kind": "status", "status": 500, "path": LOAD, "body": "no"}])
        worker = await bench.worker()
        await worker.adapters.bind(MODEL)
        for seq_id in range(8):
            assert (await worker.execute(seq_id)).state is State.READY
        executed = [simulator.stats()["executions"] for simulator in bench.simulators]
        assert executed == [0, 8]
        assert worker.counters.attempts == 8


@asynccontextmanager
async def of_two_bases() -> AsyncIterator[Bench]:
    """The first upstream serves sim/tiny, the second another model; either would take any adapter."""
    async with AsyncExitStack() as stack:
        configs = [SimulatorConfig(models=(name,)) for name in ("sim/tiny", "sim/other")]
        yield Bench([await stack.enter_async_context(Simulator(config)) for config in configs], stack)


async def test_an_adapter_is_loaded_where_its_base_model_is_served_and_nowhere_else() -> None:
    async with of_two_bases() as bench:
        worker = await bench.worker()
        await worker.adapters.bind(MODEL, "sim/tiny")
        for seq_id in range(6):
            assert (await worker.execute(seq_id)).state is State.READY
        assert bench.loads == [1, 0]
        assert [simulator.stats()["executions"] for simulator in bench.simulators] == [6, 0]
        assert worker.counters.adapter_loads_failed == 0


async def test_another_worker_finds_out_from_whoever_has_it_before_it_asks_anybody() -> None:
    """What it was told of the upstreams is older than the adapter."""
    async with of_two_bases() as bench:
        late = await bench.worker(1)
        await (await bench.worker(2)).adapters.bind(MODEL, "sim/tiny")
        assert (await late.execute()).state is State.READY
        assert bench.loads == [1, 0]


async def test_one_that_was_lost_everywhere_is_loaded_where_it_was() -> None:
    async with of_two_bases() as bench:
        worker = await bench.worker()
        await worker.adapters.bind(MODEL, "sim/tiny")
        bench.simulators[0]._adapters.paths.clear()
        await worker.pool.learn_models()
        assert (await worker.execute()).state is State.READY
        assert bench.loads == [2, 0]


async def test_where_the_base_is_not_known_a_refusal_of_an_upstream_with_another_one_is_nobodys_trouble() -> None:
    """vLLM refuses weights whose shapes do not fit; from then on it is known who has it, and nobody else is asked."""
    async with of_two_bases() as bench:
        words = "Loading lora run-1--000100 failed: size mismatch"
        bench.simulators[0].set_faults([{"kind": "status", "status": 500, "path": LOAD, "body": words}])
        worker = await bench.worker()
        await worker.adapters.bind(MODEL)
        for seq_id in range(6):
            assert (await worker.execute(seq_id)).state is State.READY
        assert (worker.counters.adapter_loads, worker.counters.adapter_loads_failed) == (1, 1)
        assert [simulator.stats()["executions"] for simulator in bench.simulators] == [0, 6]


async def test_of_two_that_would_take_it_only_one_does_whichever_worker_asks() -> None:
    """Two base models of one shape, and nobody who knows: samples of one adapter are never of both."""
    async with of_two_bases() as bench:
        workers = [await bench.worker(number) for number in range(3)]
        targets = await asyncio.gather(*(worker.adapters.bind(MODEL) for worker in workers))
        assert {target.base_model for target in targets} == {"sim/tiny"}
        for worker in workers:
            for seq_id in range(4):
                assert (await worker.execute(seq_id)).state is State.READY
        assert bench.loads == [1, 0]
        assert [simulator.stats()["executions"] for simulator in bench.simulators] == [12, 0]


async def test_a_base_that_no_upstream_lists_counts_as_not_known() -> None:
    """A trainer may call it otherwise than `--served-model-name` does."""
    async with started() as bench:
        worker = await bench.worker()
        await worker.adapters.bind(MODEL, "org/the-same-model")
        assert (await worker.execute()).state is State.READY
        assert bench.loads == [1, 1]


async def test_an_upstream_that_does_not_answer_is_passed_over() -> None:
    async with started() as bench:
        await bench.simulators[0].stop()
        worker = await bench.worker()
        await worker.adapters.bind(MODEL)
        assert (await worker.execute()).state is State.READY
        assert bench.loads == [0, 1]


async def test_while_no_upstream_answers_a_client_is_told_to_try_again() -> None:
    async with started(1) as bench:
        worker = await bench.worker()
        await bench.simulators[0].stop()
        with pytest.raises(Overloaded, match="connection refused"):
            await worker.adapters.bind(MODEL)


async def test_an_upstream_that_was_restarted_gets_its_adapters_again() -> None:
    """It refuses what its listing of before still has."""
    async with started(1) as bench:
        worker = await bench.worker()
        await worker.adapters.bind(MODEL)
        bench.simulators[0]._adapters.paths.clear()
        waves = [asyncio.create_task(worker.execute(seq_id)) for seq_id in range(1, 21)]
        assert {ending.state for ending in await asyncio.gather(*waves)} == {State.READY}
        assert bench.loads[0] >= 2
        assert bench.simulators[0]._adapters.paths == {"run-1--000100": "/adapters/run-1/000100"}
        assert bench.simulators[0].stats()["executions"] == 20


async def test_an_upstream_that_is_new_on_the_list_is_loaded_in_passing() -> None:
    async with started() as bench:
        worker = await bench.worker(urls=bench.urls[:1])
        await worker.adapters.bind(MODEL)
        worker.pool.replace(bench.urls)
        assert (await worker.execute()).state is State.READY
        await until(lambda: worker.pool.has("run-1--000100", worker.pool.up()[1]))
        assert bench.loads == [1, 1]


async def test_a_lock_whose_holder_died_is_waited_out() -> None:
    async with started(1) as bench:
        worker = await bench.worker()
        adapter = worker.pool.catalogue.adapter(MODEL.name)
        (upstream,) = worker.pool.up()
        lock = lock_name(adapter, upstream)
        assert await worker.store.take_lock(lock, "worker-that-died", ttl_s=15.0)
        binding = asyncio.create_task(worker.adapters.bind(MODEL))
        tries = worker.store.commands
        await until(lambda: worker.store.commands > tries + 3)
        assert bench.loads == [0]
        bench.server.clock.advance(15.0)
        await binding
        assert bench.loads == [1]
        assert await worker.store.take_lock(lock, "next", ttl_s=1.0)


async def test_a_lock_is_held_for_as_long_as_loading_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_loading, "_RENEW_EVERY_S", 0.005)
    async with started(1) as bench:
        bench.simulators[0].set_faults([HELD])
        worker = await bench.worker()
        binding = asyncio.create_task(worker.adapters.bind(MODEL))
        await until(lambda: bench.loads == [1])
        for _ in range(4):
            bench.server.clock.advance(10.0)
            before = worker.store.commands
            await until(lambda before=before: worker.store.commands > before + 1)  # type: ignore[misc]
        lock = lock_name(worker.pool.catalogue.adapter(MODEL.name), worker.pool.up()[0])
        assert not await worker.store.take_lock(lock, "other", ttl_s=1.0)
        bench.simulators[0]._released.set()
        await binding


async def test_a_store_that_is_away_holds_up_no_adapter() -> None:
    async with started() as bench:
        worker = await bench.worker()
        worker.store.fail_before = AWAY
        await worker.adapters.bind(MODEL)
        assert bench.loads == [1, 1]


async def test_without_a_path_template_samples_wait_for_whoever_loads_adapters() -> None:
    """Many do that by themselves: a trainer, an operator."""
    async with started() as bench:
        worker = await bench.worker(lora_path=None)
        with pytest.raises(NotFound, match="run-1"):
            await worker.adapters.bind(MODEL)
        sample = asyncio.create_task(worker.execute())
        await until(lambda: worker.running is not None and worker.running.paused_reason)
        bench.simulators[1]._adapters.load({"lora_name": "run-1--000100", "lora_path": "/x"})
        assert (await sample).state is State.READY
        assert bench.loads == [0, 0]
        assert [simulator.stats()["executions"] for simulator in bench.simulators] == [0, 1]


async def test_what_is_missing_while_an_upstream_rests_is_worth_the_long_wait() -> None:
    """It may be restarting, with the adapter."""
    async with started() as bench:
        worker = await bench.worker(lora_path=None)
        adapter = worker.pool.catalogue.adapter(MODEL.name)
        here = await worker.adapters.place(adapter)
        assert isinstance(here, Fault) and here.wait_s == 60.0
        await bench.simulators[0].stop()
        resting = await worker.adapters.place(adapter)
        assert isinstance(resting, Fault) and resting.wait_s is None


async def test_a_client_that_makes_names_up_fills_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "_BIND_RETRIES_S", 0.0)
    monkeypatch.setattr(adapters, "_REFUSALS_MAX", 5)
    async with started(1, lora="files") as bench:
        worker = await bench.worker()
        for number in range(20):
            with pytest.raises(NotFound):
                await worker.adapters.bind(ModelRef(model_path=f"tinker://made-up/{number}"))
        assert len(worker.adapters._refusals) == 5
        assert not worker.adapters._loading


async def test_a_bug_in_loading_is_a_reason_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async with started(1) as bench:
        worker = await bench.worker()

        async def broken(*_: object, **__: object) -> None:
            raise RuntimeError("a bug")

        monkeypatch.setattr(worker.adapters._loader, "load", broken)
        fault = await worker.adapters.place(worker.pool.catalogue.adapter(MODEL.name))
        assert isinstance(fault, Fault) and fault.wait_s == 60.0
