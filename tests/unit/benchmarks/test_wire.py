"""The codec benchmarks measure the real codecs on real bodies."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING

import pytest

from benchmarks import bodies
from benchmarks.micro import wire
from benchmarks.turns import Plan, measure
from tests.vllm_recordings import large_body

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.turns import Case


def test_a_body_of_the_recorded_length_is_the_recorded_one() -> None:
    assert bodies.reply_body(16_000) == large_body()


@pytest.mark.parametrize("tokens", [1, 64, 16_001, 40_000])
def test_a_body_of_any_length_keeps_the_recorded_shape(tokens: int) -> None:
    choice = json.loads(bodies.reply_body(tokens))["choices"][0]
    scored = choice["logprobs"]
    assert {len(choice["token_ids"]), *(len(scored[name]) for name in scored)} == {tokens}
    assert scored["text_offset"] == sorted(set(scored["text_offset"]))


@pytest.mark.parametrize(
    "make",
    [partial(wire.decode_case, 200), partial(wire.encode_case, 200), partial(wire.request_case, 200)],
    ids=["decode", "encode", "request"],
)
async def test_all_ways_do_the_same_and_are_measured(make: Callable[[int], Case]) -> None:
    figures = await measure(make(2), 1)
    assert [each.contender for each in figures] == ["gateway", "json, lists", "orjson, lists"]
    assert all(each.ratio is not None for each in figures[1:])


async def test_polls_are_read_alike_and_measured() -> None:
    figures = await measure(wire.poll_case(20), 1)
    assert [each.contender for each in figures] == ["gateway", "json, dict", "orjson, dict"]


@pytest.mark.parametrize("case", [wire.generation_case, wire.generation_request_case])
async def test_both_protocols_do_the_same_and_are_measured(case: Callable[[int, int], Case]) -> None:
    figures = await measure(case(200, 2), 1)
    assert [each.contender for each in figures] == ["generate", "completions"]


async def test_a_quick_run_leaves_out_the_largest() -> None:
    found = await wire.decode(Plan(rounds=1, quick=True))
    assert [figure.case.split(" (")[0] for figure in found.figures[::3]] == ["decode 64 tokens", "decode 16,384 tokens"]
