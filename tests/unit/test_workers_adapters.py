"""Which upstreams an adapter is of, by what they list and by what was told of its base model."""

from __future__ import annotations

import asyncio
import json
from random import Random
from typing import TYPE_CHECKING, Any

from shared.clock import ManualClock
from shared.core.model import ModelRef
from shared.counters import Counters
from shared.store.memory import MemoryStore
from shared.store.memory_server import MemoryServer
from workers.adapter_loading import AdapterLoader
from workers.adapters import Adapters
from workers.models import Catalogue
from workers.pool import UpstreamPool

if TYPE_CHECKING:
    from workers.upstreams import Upstream

MODEL = ModelRef(model_path="tinker://run-1/sampler_weights/000100")
NAME = "run-1--000100"


class FakeUpstreams:
    """By URL: the base model that each serves, and the adapters that it lists, with the parent that it names."""

    def __init__(self, bases: dict[str, str]) -> None:
        self.bases = bases
        self.adapters: dict[str, dict[str, str | None]] = {url: {} for url in bases}
        self.refusing: set[str] = set()
        self.loads: list[str] = []

    async def get(self, upstream: Upstream, url: object, timeout_s: float) -> bytes:
        cards: list[dict[str, Any]] = [{"id": self.bases[upstream.url], "max_model_len": 64}]
        cards += [{"id": name, "parent": parent} for name, parent in self.adapters[upstream.url].items()]
        return json.dumps({"data": cards}).encode()

    async def ask(self, upstream: Upstream, url: object, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        self.loads.append(upstream.url)
        if upstream.url in self.refusing:
            return 500, b"size mismatch"
        self.adapters[upstream.url][json.loads(body)["lora_name"]] = self.bases[upstream.url]
        return 200, b""


class Bench:
    def __init__(self, bases: dict[str, str], path_template: str | None = None) -> None:
        self.upstreams = FakeUpstreams(bases)
        self.clock = ManualClock()
        self.pool = UpstreamPool(
            tuple(bases),
            self.upstreams,  # type: ignore[arg-type] # all that is asked of it is `get` and `ask`
            Catalogue((), "{run_id}--{checkpoint}", path_template),
            self.clock,
            self._sleep,
        )
        store = MemoryStore(MemoryServer(self.clock, Random(1)))
        loader = AdapterLoader(self.pool, self.upstreams, store, Counters(), "o" * 16, 1.0)  # type: ignore[arg-type]
        self.adapters = Adapters(self.pool, loader, self.clock, 1.0, self._sleep)
        self.adapter = self.pool.catalogue.adapter(MODEL.name)

    async def _sleep(self, delay_s: float) -> None:
        await asyncio.sleep(0)
        self.clock.advance(delay_s)

    async def list_adapter(self, url: str, parent: str | None) -> None:
        self.upstreams.adapters[url][NAME] = parent
        await self.pool.learn_models()


# -- a base model by a name that no upstream lists --------------------------------------------------------------------


async def test_an_upstream_serves_an_adapter_that_it_lists_whatever_its_parent_is_called() -> None:
    """vLLM: `--served-model-name llama`, and an adapter with a `base_model_name` of its own."""
    bench = Bench({"http://a": "llama"})
    await bench.list_adapter("http://a", "meta-llama/Llama-3")
    assert bench.adapters.ready(bench.adapter)
    assert await bench.adapters.place(bench.adapter) is None


async def test_a_base_that_a_trainer_names_otherwise_keeps_no_sample_from_an_adapter_that_is_there() -> None:
    bench = Bench({"http://a": "llama"})
    await bench.list_adapter("http://a", None)
    await bench.adapters.bind(MODEL, "meta-llama/Llama-3")
    assert bench.adapters.ready(bench.adapter)


async def test_an_adapter_of_a_base_that_no_upstream_lists_is_loaded() -> None:
    bench = Bench({"http://a": "llama"}, "/x/{run_id}/{checkpoint}")
    await bench.pool.learn_models()
    await bench.adapters.bind(MODEL, "meta-llama/Llama-3")
    assert bench.upstreams.loads == ["http://a"]
    assert bench.adapters.ready(bench.adapter)


async def test_such_a_name_does_not_replace_one_that_is_listed() -> None:
    bench = Bench({"http://a": "llama", "http://b": "qwen"}, "/x/{run_id}/{checkpoint}")
    await bench.pool.learn_models()
    await bench.adapters.bind(MODEL, "qwen")
    await bench.adapters.bind(MODEL, "Qwen/Qwen3-8B")
    assert bench.upstreams.loads == ["http://b"]
