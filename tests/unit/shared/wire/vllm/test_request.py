from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from shared.core.errors import BadRequest
from shared.core.model import Image, SampleSpec, SamplingParams
from shared.wire.vllm import (
    UpstreamCall,
    UpstreamProtocol,
    beyond_completions,
    completion_budget,
    place_images,
    plan_calls,
)

SPEC = SampleSpec(b"10,11,12", 3, 1, SamplingParams(max_tokens=4))


def asked(call: UpstreamCall) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(call.body)
    return document


def only(spec: SampleSpec, context_tokens: int | None = 100) -> dict[str, Any]:
    (call,) = plan_calls(spec, "tiny", context_tokens)
    return asked(call)


def with_params(**params: Any) -> SampleSpec:
    return replace(SPEC, params=replace(SPEC.params, **params))


def test_golden_body() -> None:
    """Every sampling parameter is sent: one left out would take the model's own default."""
    (call,) = plan_calls(replace(SPEC, num_samples=2, params=replace(SPEC.params, seed=7)), "tiny", 100)
    assert (call.sequences, call.scores, call.protocol.path) == (2, False, "/v1/completions")
    assert call.body == (
        b'{"prompt":[10,11,12],"model":"tiny","min_p":0.0,"presence_penalty":0.0,"frequency_penalty":0.0,'
        b'"repetition_penalty":1.0,"return_token_ids":true,"max_tokens":4,"temperature":1.0,"top_p":1.0,"top_k":-1,'
        b'"n":2,"seed":7,"logprobs":0}'
    )


TEXTS = st.text(max_size=5) | st.sampled_from(['"max_tokens":0', '"seed":0', "[]", '\\"seed":0', "\n", "x" * 5000])
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 2**31 - 1),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    stop=st.none() | st.lists(TEXTS, max_size=2).map(tuple) | st.lists(st.integers(0, 9), max_size=2).map(tuple),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1e-9, 2.0]),
    top_k=st.sampled_from([-1, 1, 50]),
    top_p=st.sampled_from([1.0, 0.1]),
)
SPECS = st.builds(
    SampleSpec,
    prompt=st.sampled_from([b"1", b"10,11"]),
    prompt_tokens=st.just(2),
    num_samples=st.integers(1, 2),
    params=PARAMS,
    prompt_logprobs=st.booleans(),
    topk_prompt_logprobs=st.integers(0, 1),
    topk_sample_logprobs=st.integers(0, 1),
    images=st.sampled_from([(), (Image("png", b"aGk="),)]),
)


@settings(deadline=None)
@given(SPECS, TEXTS, st.sampled_from(list(UpstreamProtocol)))
def test_every_parameter_is_written_as_it_was_asked_for(
    spec: SampleSpec, model: str, protocol: UpstreamProtocol
) -> None:
    *_, sample = plan_calls(spec, model, 1000, protocol)
    document = asked(sample)
    sent = document if protocol is UpstreamProtocol.COMPLETIONS else document["sampling_params"]
    params = spec.params
    assert document["model"] == model
    assert (sent["max_tokens"], sent.get("seed")) == (completion_budget(spec, 1000), params.seed)
    assert (sent["temperature"], sent["top_k"], sent["top_p"]) == (params.temperature, params.top_k, params.top_p)
    named = sent.get("stop", sent.get("stop_token_ids", [] if "ignore_eos" in sent else None))
    assert named == (None if params.stop is None else list(params.stop))
    assert document.get("prompt", document.get("token_ids")) == [int(text) for text in spec.prompt.split(b",")]


def test_names_are_escaped() -> None:
    (call,) = plan_calls(SPEC, 'a"b\\é', 100)
    assert asked(call)["model"] == 'a"b\\é'


@pytest.mark.parametrize(
    ("max_tokens", "context_tokens", "sent"),
    [(4, 100, 4), (200, 100, 97), (97, 100, 97), (98, 100, 97), (None, 100, 97), (None, 4, 1), (5, None, 5)],
)
def test_as_much_as_fits(max_tokens: int | None, context_tokens: int | None, sent: int) -> None:
    """D11"""
    assert only(with_params(max_tokens=max_tokens), context_tokens)["max_tokens"] == sent


@pytest.mark.parametrize(("max_tokens", "context_tokens"), [(4, 3), (4, 2), (1, 3)])
def test_only_a_prompt_that_leaves_nothing_is_refused(max_tokens: int, context_tokens: int) -> None:
    """D11, in the words that users of the hosted service match on."""
    with pytest.raises(BadRequest) as caught:
        plan_calls(with_params(max_tokens=max_tokens), "tiny", context_tokens)
    assert str(caught.value) == (
        f"Prompt length plus max_tokens exceeds the model's context window: 3 + {max_tokens} > {context_tokens}"
    )


def test_nothing_left_and_nothing_asked_for() -> None:
    """D11"""
    with pytest.raises(BadRequest, match=r"3 \+ 1 > 3"):
        completion_budget(with_params(max_tokens=None), 3)


def test_unknown_context_needs_max_tokens() -> None:
    """D11"""
    with pytest.raises(BadRequest, match="max_tokens is needed"):
        completion_budget(with_params(max_tokens=None), None)


@pytest.mark.parametrize(
    ("stop", "fields"),
    [
        (None, {}),
        ((), {"ignore_eos": True}),
        (("a", "b"), {"stop": ["a", "b"], "skip_special_tokens": False}),
        ((1, 2), {"stop_token_ids": [1, 2]}),
    ],
)
def test_stop(stop: Any, fields: dict[str, Any]) -> None:
    names = {"ignore_eos", "stop", "stop_token_ids", "skip_special_tokens"}
    assert {name: value for name, value in only(with_params(stop=stop)).items() if name in names} == fields


def test_topk_asks_for_keys_that_do_not_collapse() -> None:
    body = only(replace(SPEC, topk_sample_logprobs=5))
    assert (body["logprobs"], body["return_tokens_as_token_ids"]) == (5, True)


def test_greedy_asks_for_one() -> None:
    """D12: vLLM refuses n above 1 at temperature 0."""
    spec = replace(SPEC, num_samples=4, params=replace(SPEC.params, temperature=0.0), prompt_logprobs=True)
    (call,) = plan_calls(spec, "tiny", 100)
    assert (call.sequences, call.scores) == (1, True)
    assert (asked(call)["n"], asked(call)["temperature"], asked(call)["prompt_logprobs"]) == (1, 0.0, 0)


def test_seed_is_sent_once_for_all_choices() -> None:
    """D5: vLLM gives choice i the seed + i."""
    body = only(replace(with_params(seed=2**63 - 1), num_samples=4))
    assert (body["seed"], body["n"]) == (2**63 - 1, 4)
    assert "seed" not in only(SPEC)


@pytest.mark.parametrize(("wanted", "k"), [({"prompt_logprobs": True}, 0), ({"topk_prompt_logprobs": 3}, 3)])
def test_prompt_scores_of_one_sequence_come_with_it(wanted: dict[str, Any], k: int) -> None:
    (call,) = plan_calls(replace(SPEC, **wanted), "tiny", 100)
    assert (call.sequences, call.scores) == (1, True)
    assert asked(call)["prompt_logprobs"] == k


def test_prompt_scores_of_several_are_asked_apart() -> None:
    """D15: they are those of temperature 1, whatever the sequences are sampled at."""
    spec = replace(with_params(temperature=0.5, top_p=0.5, top_k=3, seed=1), num_samples=4, topk_prompt_logprobs=2)
    scores, sample = plan_calls(spec, "tiny", 100)
    assert (scores.sequences, scores.scores) == (0, True)
    assert (sample.sequences, sample.scores) == (4, False)
    body = asked(scores)
    assert (body["n"], body["max_tokens"], body["prompt_logprobs"]) == (1, 1, 2)
    assert (body["temperature"], body["top_p"], body["top_k"]) == (1.0, 1.0, -1)
    assert "prompt_logprobs" not in asked(sample)


# -- /inference/v1/generate -------------------------------------------------------------------------------------------


def generated(spec: SampleSpec, context_tokens: int | None = 100) -> dict[str, Any]:
    (call,) = plan_calls(spec, "tiny", context_tokens, UpstreamProtocol.GENERATE)
    return asked(call)


def test_golden_generation() -> None:
    """The same parameters under the same names, beside the prompt's ids."""
    spec = replace(SPEC, num_samples=2, params=replace(SPEC.params, seed=7))
    (call,) = plan_calls(spec, "tiny", 100, UpstreamProtocol.GENERATE)
    assert (call.sequences, call.scores, call.protocol.path) == (2, False, "/inference/v1/generate")
    assert call.body == (
        b'{"token_ids":[10,11,12],"model":"tiny","sampling_params":{"min_p":0.0,"presence_penalty":0.0,'
        b'"frequency_penalty":0.0,"repetition_penalty":1.0,"max_tokens":4,"temperature":1.0,"top_p":1.0,"top_k":-1,'
        b'"n":2,"seed":7,"logprobs":0}}'
    )


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 0.0}, {"stop": ()}, {"stop": ("a", "b")}, {"stop": (1, 2)}, {"seed": 3}, {"max_tokens": None}],
    ids=repr,
)
def test_both_protocols_sample_alike(params: dict[str, Any]) -> None:
    """D5, D11, D12"""
    spec = replace(with_params(**params), num_samples=3)
    completion, generation = only(spec), generated(spec)
    assert completion.pop("prompt") == generation["token_ids"]
    assert completion.pop("model") == generation["model"]
    assert completion.pop("return_token_ids")
    assert completion == generation["sampling_params"]


@pytest.mark.parametrize(("wanted", "sent"), [(0, 0), (1, 2), (19, 20)])
def test_topk_of_a_generation_counts_the_sampled_token(wanted: int, sent: int) -> None:
    assert generated(replace(SPEC, topk_sample_logprobs=wanted))["sampling_params"]["logprobs"] == sent


def test_prompt_scores_of_a_generation() -> None:
    """D15: with one sequence together; with several apart, as each of them would compute them anew."""
    spec = replace(with_params(temperature=0.5), topk_prompt_logprobs=2)
    assert generated(spec)["sampling_params"]["prompt_logprobs"] == 2
    scores, sample = plan_calls(replace(spec, num_samples=4), "tiny", 100, UpstreamProtocol.GENERATE)
    assert [(call.sequences, call.scores) for call in (scores, sample)] == [(0, True), (4, False)]
    params = asked(scores)["sampling_params"]
    assert (params["n"], params["max_tokens"], params["temperature"], params["prompt_logprobs"]) == (1, 1, 1.0, 2)
    assert "prompt_logprobs" not in asked(sample)["sampling_params"]


@pytest.mark.parametrize(
    ("stop", "beyond"),
    [(None, False), ((), False), (("a",) * 4, False), (("a",) * 5, True), (tuple(range(50)), False)],
)
def test_long_stop_lists_are_beyond_completions(stop: Any, beyond: bool) -> None:
    """vLLM bounds the stop strings of a completion, and neither token ids nor those of a generation."""
    spec = with_params(stop=stop)
    told = beyond_completions(spec)
    assert (told is not None) is beyond
    if told is not None:
        assert "stop has 5 strings" in told
        assert generated(spec)["sampling_params"]["stop"] == list(stop)


def test_images_of_a_generation() -> None:
    """The placeholder stands once for each; the reply must tell what became of them."""
    images = (Image("png", b"iVBORw=="), Image("jpeg", b"/9j/4A=="))
    spec = replace(SPEC, prompt=b"1,?,2,?", prompt_tokens=4, images=images)
    told = beyond_completions(spec)
    assert told is not None
    assert "'image'" in told
    (call,) = plan_calls(place_images(spec, 151655), "tiny", 100, UpstreamProtocol.GENERATE)
    document = asked(call)
    assert document["token_ids"] == [1, 151655, 2, 151655]
    assert document["content_parts"] == [
        {"type": "image_url", "url": "data:image/png;base64,iVBORw=="},
        {"type": "image_url", "url": "data:image/jpeg;base64,/9j/4A=="},
    ]
    assert document["return_token_ids"] is True
    assert {"content_parts", "return_token_ids"}.isdisjoint(generated(SPEC))
