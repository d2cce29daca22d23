"""Which upstreams an adapter is of, by what they list and by what was told of its base model."""

from __future__ import annotations

import asyncio
import json
from random import Random
from typing import TYPE_CHECKING, Any

from shared.clock import ManualClock
from shared.core.model import ModelRef
from shared.counters import Counters
from tests.memory_store import MemoryServer, MemoryStore
from workers.upstream.adapter_loading import AdapterLoader
from workers.upstream.adapters import Adapters
from workers.upstream.catalogue import Catalogue
from workers.upstream.pool import UpstreamPool

if TYPE_CHECKING:
    from workers.upstream.upstream import Upstream

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


# -- two base models of one shape -------------------------------------------------------------------------------------

TWINS = {"http://a": "qwen", "http://b": "qwen-base"}
PATHS = "/x/{run_id}/{checkpoint}"


def asked(bench: Bench) -> set[str]:
    return {bench.pool.choose(NAME, session_key=f"session-{number}").url for number in range(50)}


async def test_where_nobody_knows_the_base_one_upstream_decides_it_for_all() -> None:
    bench = Bench(TWINS, PATHS)
    await bench.pool.learn_models()
    target = await bench.adapters.bind(MODEL)
    assert bench.adapters.ready(bench.adapter)
    assert not bench.adapters._loading
    assert (target.base_model, bench.upstreams.loads, asked(bench)) == ("qwen", ["http://a"], {"http://a"})


async def test_one_that_refuses_leaves_it_to_the_next() -> None:
    bench = Bench(TWINS, PATHS)
    bench.upstreams.refusing = {"http://a"}
    await bench.pool.learn_models()
    target = await bench.adapters.bind(MODEL)
    assert (target.base_model, bench.upstreams.loads) == ("qwen-base", ["http://a", "http://b"])
    assert asked(bench) == {"http://b"}


async def test_where_all_refuse_each_is_asked_once_before_that_is_said() -> None:
    """Each is asked after another look, two seconds later: the pause of the first is over before the last refuses."""
    bench = Bench({f"http://{number}": f"model-{number}" for number in range(8)}, PATHS)
    bench.upstreams.refusing = set(bench.upstreams.bases)
    await bench.pool.learn_models()
    fault = await bench.adapters.place(bench.adapter)
    assert fault is not None and "size mismatch" in fault.message
    assert bench.upstreams.loads == list(bench.upstreams.bases)


async def test_where_all_refused_each_has_its_turn_again() -> None:
    """The files came late, and the first upstream on the list will never take them."""
    bench = Bench(TWINS, PATHS)
    bench.upstreams.refusing = set(TWINS)
    await bench.pool.learn_models()
    assert await bench.adapters.place(bench.adapter) is not None
    bench.upstreams.refusing = {"http://a"}
    for _ in range(2):
        bench.clock.advance(20.0)
        fault = await bench.adapters.place(bench.adapter)
    assert fault is None
    assert asked(bench) == {"http://b"}


async def test_what_was_told_counts_for_more_than_what_an_upstream_lists() -> None:
    """A worker that knew nothing had it loaded into the wrong one."""
    bench = Bench(TWINS, PATHS)
    await bench.list_adapter("http://b", "qwen-base")
    target = await bench.adapters.bind(MODEL, "qwen")
    assert (target.base_model, bench.upstreams.loads, asked(bench)) == ("qwen", ["http://a"], {"http://a"})


async def test_an_adapter_of_the_wrong_base_is_not_there() -> None:
    bench = Bench(TWINS)
    await bench.list_adapter("http://b", "qwen-base")
    assert bench.adapters.ready(bench.adapter)
    bench.pool.bases.report(NAME, "qwen")
    assert not bench.adapters.ready(bench.adapter)
    assert await bench.adapters.place(bench.adapter) is not None
    assert asked(bench) == {"http://a"}


async def test_of_two_that_list_it_with_another_parent_each_the_first_counts() -> None:
    bench = Bench(TWINS)
    await bench.list_adapter("http://b", "qwen-base")
    await bench.list_adapter("http://a", "qwen")
    assert (await bench.adapters.bind(MODEL)).base_model == "qwen"
    assert asked(bench) == {"http://a"}


async def test_where_the_parent_tells_nothing_it_stays_where_it_is() -> None:
    """The parent is no listed name: that one upstream has it is all that is known."""
    bench = Bench(TWINS, PATHS)
    await bench.list_adapter("http://b", "Qwen/Qwen3-8B-Base")
    assert bench.adapters.ready(bench.adapter)
    await asyncio.gather(*bench.adapters._loading.values())
    assert bench.upstreams.loads == []
    assert asked(bench) == {"http://b"}


async def test_upstreams_of_the_same_base_all_load_it() -> None:
    bench = Bench({**TWINS, "http://c": "qwen"}, PATHS)
    await bench.pool.learn_models()
    await bench.adapters.bind(MODEL)
    assert (bench.upstreams.loads, asked(bench)) == (["http://a", "http://c"], {"http://a", "http://c"})


async def test_upstreams_that_tell_no_parents_are_of_one_base_where_they_have_one_in_common() -> None:
    bench = Bench({"http://a": "llama", "http://b": "llama"}, PATHS)
    await bench.list_adapter("http://a", None)
    assert bench.adapters.ready(bench.adapter)
    await asyncio.gather(*bench.adapters._loading.values())
    assert bench.upstreams.loads == ["http://b"]
