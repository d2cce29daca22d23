"""What can be sampled from, and under which name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shared.config import ModelName
from shared.core.adapters import Adapter
from shared.core.errors import NotFound, Overloaded
from shared.core.model import ModelRef
from workers.upstream.catalogue import Catalogue, Served, Target, decode_listing

BASE = Served("org/base", None, 4096)
ADAPTER = Served("run-1", "org/base", None)


def catalogue(*served: Served, offered: tuple[ModelName, ...] = (), template: str = "{run_id}") -> Catalogue:
    made = Catalogue(offered, template)
    made.replace(served)
    return made


def test_base_models_are_offered_and_adapters_are_not() -> None:
    assert catalogue(BASE, ADAPTER).base_models() == {"org/base": 4096}


def test_the_smallest_context_of_equal_names_counts() -> None:
    """A sample may be sent to any upstream: it must fit all."""
    both = catalogue(BASE, Served("org/base", None, 2048), Served("org/base", None, None))
    assert both.base_models() == {"org/base": 2048}


def test_an_offered_name_hides_the_upstreams() -> None:
    named = catalogue(BASE, ADAPTER, offered=(ModelName("public", "org/base"),))
    assert named.resolve(ModelRef(base_model="public")) == Target("org/base", "public", 4096)
    with pytest.raises(NotFound, match="offered: public"):
        named.resolve(ModelRef(base_model="org/base"))


def test_a_model_that_no_upstream_lists_is_named_as_the_flag_has_it() -> None:
    offered = (ModelName("org/base", "org/base"), ModelName("mine", "alias"), ModelName("org/other", "org/other"))
    assert catalogue(BASE, offered=offered).unlisted() == ("mine=alias", "org/other")
    assert catalogue(BASE).unlisted() == ()


def test_an_adapter_takes_its_context_from_its_base() -> None:
    path = "tinker://run-1/sampler_weights/000100"
    target = catalogue(BASE, ADAPTER).resolve(ModelRef(model_path=path))
    assert target == Target("run-1", "org/base", 4096, Adapter(path, "run-1", None))


def test_an_unknown_path_is_named() -> None:
    with pytest.raises(NotFound, match="tinker://nope/sampler_weights/1"):
        catalogue(BASE).resolve(ModelRef(model_path="tinker://nope/sampler_weights/1"))


def test_what_is_no_path_of_sampler_weights_is_named() -> None:
    with pytest.raises(NotFound, match="tinker://r/weights/c"):
        catalogue(BASE).resolve(ModelRef(model_path="tinker://r/weights/c"))


def test_an_adapter_that_nobody_serves_yet_is_assumed_to_fit_the_smallest_base() -> None:
    made = catalogue(Served("large", None, 8192), Served("small", None, 1024), Served("odd", None, None))
    adapter = made.adapter("tinker://run-9/c")
    assert made.awaited(adapter) == Target("run-9", "small", 1024, adapter)


def test_before_any_upstream_has_told_nothing_is_assumed() -> None:
    made = catalogue()
    with pytest.raises(Overloaded):
        made.awaited(made.adapter("tinker://run-9/c"))


@pytest.mark.parametrize("body", [b"", b"[]", b'{"data":[{}]}', b"<html>", b"\xff"])
def test_what_is_no_listing_is_a_value_error(body: bytes) -> None:
    with pytest.raises(ValueError, match="not a /v1/models reply"):
        decode_listing(body)


def test_a_recorded_listing() -> None:
    recorded = json.loads((Path(__file__).parents[3] / "data/vllm/51_v1_models.json").read_text())
    assert decode_listing(recorded["response"]["body"].encode()) == [Served("tiny", None, 4096)]
