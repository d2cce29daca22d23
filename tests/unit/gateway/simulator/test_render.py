"""Bodies have the form of a real vLLM's: the same keys in the same order, the same types, about the same size."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gateway.simulator import generate_api
from gateway.simulator.ask import Ask, Refused, ServedModels, read_ask
from gateway.simulator.completion import generate
from gateway.simulator.render import completion, metrics, models
from gateway.simulator.stats import Stats
from gateway.simulator.tokens import ASKS_TO_END, IMAGE, alternatives, image_tokens, prompt_logprobs, sampled
from tests.vllm_recordings import large_body, recording

SERVED = ServedModels(("tiny", "a1"), (), 131_072)
COMPLETIONS = [
    "20_logprobs0",
    "20_logprobs0_both_n4",
    "20_logprobs1_both",
    "20_logprobs1_retids",
    "20_logprobs1_tokids",
    "20_logprobs5",
    "20_n4",
    "20_plain_n1",
    "20_plp0",
    "20_plp1",
    "20_plp1_n4",
    "21_max1",
    "21_max_null",
    "21_seed7_n1",
    "21_temp0",
    "23_return_only_ids",
    "23_xreqid",
    "24_gen_a1",
]
GENERATIONS = ["50_gen_lp0", "50_gen_lp1", "50_gen_n2_lp0", "50_gen_plp1"]


def shape(value: Any) -> Any:
    """Return keys in order and types; for a list, its length and first two entries; ids used as keys are equal."""
    if isinstance(value, dict):
        return [(key if not _is_token(key) else "token", shape(one)) for key, one in value.items()]
    if isinstance(value, list):
        return len(value), [shape(one) for one in value[:2]]
    return type(value).__name__


def _is_token(key: str) -> bool:
    return key.isdigit() or key.startswith("token_id:")


def body_for(asked: dict[str, Any]) -> bytes:
    ask = read_ask(asked, SERVED)
    return completion(ask, generate(ask, 0), "some-id", 1_795_958_229)


@pytest.mark.parametrize("name", COMPLETIONS)
def test_a_completion_has_the_shape_of_the_recorded_one(name: str) -> None:
    recorded = recording(name)
    ours = json.loads(body_for(recorded.asked))
    theirs = json.loads(recorded.body)
    for document in (ours, theirs):
        for choice in document["choices"]:
            _only_what_is_comparable(choice)
    assert shape(ours) == shape(theirs)


def _only_what_is_comparable(choice: dict[str, Any]) -> None:
    """Texts are the tokenizer's own, and with text for keys `top_logprobs` has them too."""
    logprobs = choice["logprobs"]
    if logprobs and not logprobs["tokens"][0].startswith("token_id:"):
        logprobs["top_logprobs"] = [list(row.values()) for row in logprobs["top_logprobs"]]


@pytest.mark.parametrize("name", ["20_logprobs0", "20_logprobs0_both_n4", "20_plain_n1", "23_xreqid"])
def test_small_bodies_are_about_as_large_as_the_recorded_ones(name: str) -> None:
    recorded = recording(name)
    assert len(body_for(recorded.asked)) == pytest.approx(len(recorded.body), rel=0.1)


def test_a_long_body_has_as_many_bytes_a_token_as_the_recorded_one() -> None:
    theirs = json.loads(large_body())
    asked = {"model": "tiny", "prompt": [10, 11, 12], "max_tokens": 16_000, "logprobs": 0}
    ours = body_for({**asked, "return_token_ids": True, "return_tokens_as_token_ids": True})
    assert theirs["usage"]["completion_tokens"] == 16_000
    assert len(ours) / 16_000 == pytest.approx(len(large_body()) / 16_000, rel=0.1)


def test_numbers_are_float32_widened_to_double() -> None:
    asked = {"model": "tiny", "prompt": [1, 2], "max_tokens": 50, "seed": 3, "logprobs": 0}
    told = json.loads(body_for(asked))["choices"][0]["logprobs"]["token_logprobs"]
    assert np.array_equal(np.array(told, np.float64).astype(np.float32), sampled("tiny", [1, 2], 3, 50)[1])
    assert all(float(np.float32(value)) == value for value in told)


def test_text_offsets_count_the_names_that_are_told() -> None:
    asked = {"model": "tiny", "prompt": [1], "seed": 1, "max_tokens": 5, "logprobs": 0}
    for as_ids in (True, False):
        told = json.loads(body_for({**asked, "return_tokens_as_token_ids": as_ids}))["choices"][0]["logprobs"]
        assert told["text_offset"] == [sum(map(len, told["tokens"][:count])) for count in range(5)]


def test_the_sampled_token_comes_first_then_the_best_others() -> None:
    asked = {"model": "tiny", "prompt": [1], "seed": 1, "max_tokens": 20, "logprobs": 3}
    choice = json.loads(body_for({**asked, "return_tokens_as_token_ids": True, "return_token_ids": True}))["choices"][0]
    others = alternatives("tiny", [1], 1, 20, 3)[1]
    for place, row in enumerate(choice["logprobs"]["top_logprobs"]):
        assert next(iter(row)) == f"token_id:{choice['token_ids'][place]}"
        assert len(row) in (3, 4)
        best = sorted(row.values(), reverse=True)[0]
        assert best == max(float(others[place][0]), choice["logprobs"]["token_logprobs"][place])


def test_prompt_logprobs_ignore_the_temperature() -> None:
    """D15"""
    asked = {"model": "tiny", "prompt": [5, 6, 7], "prompt_logprobs": 0, "max_tokens": 1}
    cold, warm = (json.loads(body_for({**asked, "temperature": t}))["choices"][0]["prompt_logprobs"] for t in (0.1, 1))
    assert cold == warm
    assert cold[0] is None
    assert [row[str(token)]["logprob"] for row, token in zip(cold[1:], [6, 7], strict=True)] == prompt_logprobs(
        "tiny", [5, 6, 7]
    )[1:].tolist()


@pytest.mark.parametrize("prompt", [[10, ASKS_TO_END]])
def test_text_leaves_out_what_stopped_it(prompt: list[int]) -> None:
    asked = {"model": "tiny", "prompt": prompt, "max_tokens": 64, "seed": 1}
    choice = json.loads(body_for({**asked, "return_token_ids": True}))["choices"][0]
    assert choice["text"] == "".join(f" t{token}" for token in choice["token_ids"][:-1])
    stopped = json.loads(body_for({**asked, "stop": ["t" + str(choice["token_ids"][1])]}))["choices"][0]
    assert stopped["text"] == f" t{choice['token_ids'][0]} "


def test_usage_counts_the_prompt_once() -> None:
    usage = json.loads(body_for({"model": "tiny", "prompt": [1, 2], "max_tokens": 3, "n": 4}))["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (2, 12, 14)


@pytest.mark.parametrize("name", GENERATIONS)
def test_generate_has_the_shape_of_the_recorded_one(name: str) -> None:
    recorded = recording(name)
    assert shape(generated(recorded.asked)) == shape(json.loads(recorded.body))


def generated(asked: dict[str, Any]) -> Any:
    ask = generate_api.read(asked, SERVED)
    return json.loads(generate_api.render(ask, generate(ask, 0), "some-id", 1))


@pytest.mark.parametrize("k", [1, 3, 5])
def test_a_generation_tells_the_best_tokens_as_a_completion_does(k: int) -> None:
    """The sampled token counts as one of the k: with one more, the k best are among them."""
    params = {"max_tokens": 6, "seed": 3, "temperature": 0.5}
    completed = json.loads(
        body_for(
            {"model": "tiny", "prompt": [5, 6], **params, "logprobs": k, "return_tokens_as_token_ids": True},
        )
    )["choices"][0]["logprobs"]
    content = generated({"model": "tiny", "token_ids": [5, 6], "sampling_params": {**params, "logprobs": k + 1}})[
        "choices"
    ][0]["logprobs"]["content"]
    assert [place["logprob"] for place in content] == completed["token_logprobs"]
    for place, row in zip(content, completed["top_logprobs"], strict=True):
        entries = place["top_logprobs"]
        assert len(entries) == k + 1
        assert entries[0] == {name: place[name] for name in ("token_id", "logprob", "rank")}
        assert [entry["rank"] for entry in entries[1:]] == sorted(entry["rank"] for entry in entries[1:])
        told = {f"token_id:{entry['token_id']}": entry["logprob"] for entry in entries}
        assert row.items() <= told.items()


@pytest.mark.parametrize(("params", "max_tokens"), [({}, 98), ({"max_tokens": 5}, 5), ({"max_tokens": 1000}, 98)])
def test_generate_goes_to_the_end_of_the_context_when_not_told(params: dict[str, Any], max_tokens: int) -> None:
    asked = {"model": "tiny", "token_ids": [1, 2], "sampling_params": params}
    assert generate_api.read(asked, replace(SERVED, max_model_len=100)).max_tokens == max_tokens


@pytest.mark.parametrize("asked", [{}, [], None, {"token_ids": [1]}, {"token_ids": 1, "sampling_params": {}}])
def test_a_generation_of_nothing_is_refused_before_its_model_is_looked_for(asked: Any) -> None:
    with pytest.raises(Refused) as caught:
        generate_api.read(asked, SERVED)
    assert caught.value.status == 400


def test_a_generation_has_other_bounds_than_a_completion() -> None:
    asked = {"model": "tiny", "token_ids": [1, 2], "sampling_params": {"stop": ["a"] * 50, "n": 9, "max_tokens": 1}}
    assert len(generate_api.read(asked, SERVED).stop) == 50
    assert generate_api.read(asked, SERVED, max_num_seqs=9).n == 9
    with pytest.raises(Refused, match=r"max_num_seqs \(8\), got 9"):
        generate_api.read(asked, SERVED, max_num_seqs=8)


def test_models_have_the_shape_of_the_recorded_ones() -> None:
    served = ServedModels(("tiny",), (), 4096)
    ours = models(served, {"a1": "/models/a1", "a2": "/models/a2"}, 1)
    theirs = json.loads(recording("24_models_after").body)
    theirs["data"] = theirs["data"][:3]
    assert shape(ours) == shape(theirs)
    assert ours["data"][0]["max_model_len"] == 4096
    assert (ours["data"][1]["parent"], ours["data"][1]["root"]) == ("tiny", "/models/a1")


def test_metrics_tell_what_runs_and_waits() -> None:
    text = metrics("tiny", Stats(in_flight=3, waiting=2))
    assert 'vllm:num_requests_running{engine="0",model_name="tiny"} 3.0' in text.splitlines()
    assert 'vllm:num_requests_waiting{engine="0",model_name="tiny"} 2.0' in text.splitlines()


def test_a_request_for_nothing_more_gets_nothing_more() -> None:
    ask = Ask("tiny", np.array([1], np.int32), 2)
    choice = json.loads(completion(ask, generate(ask, 0), "x", 1))["choices"][0]
    assert [choice[key] for key in ("logprobs", "token_ids", "prompt_token_ids", "prompt_logprobs")] == [None] * 4


def test_a_generation_tells_where_its_images_are() -> None:
    url = "data:image/png;base64," + base64.b64encode(b"picture").decode()
    asked = {"model": "tiny", "token_ids": [8, IMAGE, 9], "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0}}
    told = generated({**asked, "content_parts": [{"type": "image_url", "url": url}], "return_token_ids": True})
    inside = image_tokens(b"picture")
    assert told["prompt_token_ids"] == [8, *inside, 9]
    assert told["mm_placeholders"] == {"image": [{"offset": 1, "length": len(inside)}]}
    assert len(told["prompt_logprobs"]) == len(inside) + 2
    assert (generated(asked)["prompt_token_ids"], generated(asked)["mm_placeholders"]) == (None, None)


@pytest.mark.parametrize("url", ["http://h/x.png", "data:image/png;base64,?", None])
def test_nothing_is_fetched_for_a_generation(url: str | None) -> None:
    asked = {"model": "tiny", "token_ids": [IMAGE], "sampling_params": {}}
    with pytest.raises(Refused):
        generate_api.read({**asked, "content_parts": [{"type": "image_url", "url": url}]}, SERVED)
