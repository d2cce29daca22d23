"""Replies of `/inference/v1/generate`: recorded ones, and ones that are no result."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from typing import Any, Final

import pytest
from msgspec.structs import replace

from shared.core.faults import Fault, FaultClass
from shared.core.model import Category, Image, SampleSpec, SamplingParams
from shared.wire import json_arrays
from shared.wire.vllm import Decoded, UpstreamCall, UpstreamProtocol, combine, decode_reply
from tests.vllm_recordings import recording

SPEC: Final = SampleSpec(b"10,11,12", 3, 1, SamplingParams(max_tokens=4))
CALL: Final = UpstreamCall(b"", 1, False, UpstreamProtocol.GENERATE)

Loader = Callable[[bytes | bytearray], Any]


@pytest.fixture(params=sorted(json_arrays.LOADERS))
def load(request: pytest.FixtureRequest) -> Loader:
    return json_arrays.LOADERS[request.param]


def place(token: Any, logprob: Any, *others: tuple[int, float]) -> dict[str, Any]:
    """What is told of one sampled token; itself is the first of its row."""
    row = [{"token_id": one, "logprob": value, "rank": 1} for one, value in [(token, logprob), *others]]
    return {"token_id": token, "logprob": logprob, "rank": 1, "top_logprobs": row}


def choice(*content: dict[str, Any], **more: Any) -> dict[str, Any]:
    told = content or (place(5, -0.5), place(6, -1.5))
    return {
        "index": 0,
        "finish_reason": "length",
        "token_ids": [one["token_id"] for one in told],
        "weight_versions": [{"version": "default", "start": 0, "end": len(told)}],
        "logprobs": {"content": told},
        **more,
    }


def reply(*choices: dict[str, Any], **more: Any) -> bytes:
    usage = {"prompt_tokens_details": {"cached_tokens": 2}}
    return json.dumps({"choices": choices, "usage": usage, "prompt_logprobs": None, **more}).encode()


def decoded(body: bytes, load: Loader, spec: SampleSpec = SPEC, call: UpstreamCall = CALL) -> Decoded:
    found = decode_reply(call, spec, body, load)
    assert isinstance(found, Decoded), found
    return found


def fault_of(body: bytes, load: Loader, spec: SampleSpec = SPEC, call: UpstreamCall = CALL) -> Fault:
    found = decode_reply(call, spec, body, load)
    assert isinstance(found, Fault), found
    return found


def ints(data: bytes) -> list[int]:
    return [value for (value,) in struct.iter_unpack("<i", data)]


def reals(data: bytes) -> list[float]:
    return [value for (value,) in struct.iter_unpack("<f", data)]


@pytest.mark.parametrize("name", ["50_gen_lp0", "50_gen_lp1", "50_gen_n2_lp0"])
def test_recorded_generations(name: str, load: Loader) -> None:
    told = recording(name)
    found = decoded(told.body, load, told.spec, told.call)
    choices = json.loads(told.body)["choices"]
    assert len(found.sequences) == len(choices)
    for sequence, said in zip(found.sequences, choices, strict=True):
        assert ints(sequence.tokens) == said["token_ids"]
        assert reals(sequence.logprobs) == [one["logprob"] for one in said["logprobs"]["content"]]
        assert sequence.stop_reason.value == said["finish_reason"]
    assert (found.mixed, found.cached_tokens) == ((), 0)


def test_recorded_generation_is_what_completions_told_of_the_same_seed(load: Loader) -> None:
    """The same prompt and seed at the same server: neither path changes what is sampled."""
    ours, theirs = recording("50_gen_n2_lp0"), recording("21_seed7_n2")
    assert ours.spec.prompt == theirs.spec.prompt
    here = decoded(ours.body, load, ours.spec, ours.call).sequences
    there = decoded(theirs.body, load, replace(theirs.spec, topk_sample_logprobs=0), theirs.call).sequences
    for one, other in zip(here, there, strict=True):
        tokens = min(len(one.tokens), len(other.tokens))
        assert tokens
        assert (one.tokens[:tokens], one.logprobs[:tokens]) == (other.tokens[:tokens], other.logprobs[:tokens])


def test_recorded_prompt_scores(load: Loader) -> None:
    """D15: told once, whatever n is."""
    told = recording("50_gen_plp1")
    found = decoded(told.body, load, told.spec, replace(told.call, sequences=0))
    rows = json.loads(told.body)["prompt_logprobs"]
    assert found.scores is not None
    assert found.scores.logprobs is not None
    assert found.scores.topk is not None
    own = reals(found.scores.logprobs)
    assert math.isnan(own[0])
    asked = told.asked["token_ids"]
    assert own[1:] == [row[str(token)]["logprob"] for row, token in zip(rows[1:], asked[1:], strict=True)]
    best = [max(row.items(), key=lambda item: item[1]["logprob"]) for row in rows[1:]]
    assert ints(found.scores.topk.token_ids)[1:] == [int(token) for token, _ in best]


def test_a_generation_without_logprobs_is_no_result(load: Loader) -> None:
    told = recording("50_gen_plp1")
    fault = fault_of(told.body, load, told.spec, told.call)
    assert (fault.kind, fault.message) == (FaultClass.AMBIGUOUS, "upstream answered 200 without logprobs")


def test_the_k_best_are_kept(load: Loader) -> None:
    """Asked for k + 1 rows, since the sampled token is one of them."""
    first = place(5, -3.0, (7, -0.1), (8, -0.2))
    second = place(7, -0.1, (8, -0.2), (9, -0.3))
    found = decoded(reply(choice(first, second)), load, replace(SPEC, topk_sample_logprobs=2))
    topk = found.sequences[0].topk
    assert topk is not None
    assert (topk.k, topk.length) == (2, 2)
    assert ints(topk.token_ids) == [7, 8, 7, 8]
    assert reals(topk.logprobs) == [pytest.approx(value) for value in (-0.1, -0.2, -0.1, -0.2)]


def test_choices_are_put_in_order(load: Loader) -> None:
    """D4"""
    body = reply(choice(place(6, -1.0), index=1), choice(place(5, -1.0)))
    found = decoded(body, load, call=replace(CALL, sequences=2))
    assert [ints(sequence.tokens) for sequence in found.sequences] == [[5], [6]]


def test_cached_tokens_are_counted_once(load: Loader) -> None:
    found = decoded(reply(choice()), load)
    assert combine(SPEC, [found]).prompt_cache_hit_tokens == 2


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        (reply(), FaultClass.AMBIGUOUS, "with 0 choices where 1"),
        (reply(choice(), choice()), FaultClass.AMBIGUOUS, "with 2 choices where 1"),
        (reply(choice(index=1)), FaultClass.AMBIGUOUS, "choices numbered"),
        (reply(choice(finish_reason="error")), FaultClass.AMBIGUOUS, "finish_reason 'error'"),
        (reply(choice(logprobs=None)), FaultClass.AMBIGUOUS, "without logprobs"),
        (reply(choice(logprobs={"content": None})), FaultClass.AMBIGUOUS, "without logprobs"),
        (reply(choice(token_ids=None)), FaultClass.AMBIGUOUS, "token ids that are not all integers"),
        (reply(choice(token_ids=[5])), FaultClass.AMBIGUOUS, "1 token ids and 2 logprobs"),
        (reply(choice(token_ids=[5, 2**31])), FaultClass.WRONG_REPLY, "not all in 0 .. 2**31 - 1"),
        (reply(choice(token_ids=[5, 2**63])), FaultClass.WRONG_REPLY, ""),
        (reply(choice(token_ids=[5, -1])), FaultClass.WRONG_REPLY, "not all in 0 .. 2**31 - 1"),
        (reply(choice(token_ids=[5, 1.5])), FaultClass.AMBIGUOUS, "not all integers"),
        (reply(choice(place(5, None))), FaultClass.AMBIGUOUS, "logprobs that are not all numbers"),
        (reply(choice(place(5, "x"))), FaultClass.AMBIGUOUS, "logprobs that are not all numbers"),
        (reply(choice(place(5, -1e300))), FaultClass.REFUSED, "NaN"),
        (b'{"choices":[{"index":0,"finish_reason":"length"}]}', FaultClass.AMBIGUOUS, "without logprobs"),
        (reply(choice(logprobs={"content": [{"token_id": 5}]})), FaultClass.AMBIGUOUS, "no completion"),
        (reply(choice(logprobs={"content": 7})), FaultClass.AMBIGUOUS, "no completion"),
        (b'{"error":{"message":"broke"}}', FaultClass.AMBIGUOUS, "broke"),
        (b"<html>", FaultClass.AMBIGUOUS, "HTML"),
    ],
)
def test_what_is_no_result(load: Loader, body: bytes, kind: FaultClass, words: str) -> None:
    """D3, D4, D13, D14: the same classes as for completions."""
    fault = fault_of(body, load)
    assert (fault.kind, fault.category) == (kind, Category.SERVER)
    assert words in fault.message


def test_rows_of_topk_must_be_there(load: Loader) -> None:
    spec = replace(SPEC, topk_sample_logprobs=1)
    without = choice({"token_id": 5, "logprob": -1.0, "top_logprobs": []})
    assert "rows of top_logprobs" in fault_of(reply(without), load, spec).message
    # vLLM's older versions told each candidate as the sampled token's text.
    texts = choice({"token_id": 5, "logprob": -1.0, "top_logprobs": [{"token": "token_id:5", "logprob": -1.0}]})
    assert fault_of(reply(texts), load, spec).kind is FaultClass.AMBIGUOUS


@pytest.mark.parametrize("tokens", [0, 3])
def test_an_abort_is_no_result(load: Loader, tokens: int) -> None:
    """D9, D16, D17"""
    content = [place(5, -1.0)] * tokens
    aborted = {**choice(), "finish_reason": "abort", "token_ids": [5] * tokens, "logprobs": {"content": content}}
    fault = fault_of(reply(aborted), load)
    assert fault.kind is (FaultClass.ABORTED if tokens else FaultClass.NEVER_EXECUTED)
    assert f"after {tokens} tokens" in fault.message


def test_nan_is_the_models_fault(load: Loader) -> None:
    """D10: where completions answer 400, this path tells -9999 in place of NaN, and says nothing."""
    fault = fault_of(reply(choice(place(0, -9999.0), place(0, -9999.0))), load)
    assert (fault.kind, fault.category) == (FaultClass.REFUSED, Category.SERVER)
    assert "the model computes NaN: bad weights or adapter" in fault.message


def span(version: Any, start: Any, end: Any) -> dict[str, Any]:
    return {"version": version, "start": start, "end": end}


@pytest.mark.parametrize(
    ("spans", "mixed"),
    [
        ([span("step-1", 0, 2)], ()),
        ([span("step-1", 0, 1), span("step-2", 1, 2)], (("step-1", "step-2"),)),
        ([span("step-1", 0, 0), span("step-2", 0, 2)], ()),
        ([span("v" * 200, 0, 1), span("w", 1, 2)], (("v" * 64, "w"),)),
        ([], ()),
        (None, ()),
        ("what", ()),
        ([span("step-1", None, 1)], ()),
        ([{"version": "step-1"}], ()),
    ],
)
def test_weights_that_changed_in_the_middle_are_told(load: Loader, spans: Any, mixed: tuple[tuple[str, ...]]) -> None:
    """What is not told as vLLM tells it is not told; no generation is thrown away for that."""
    found = decoded(reply(choice(weight_versions=spans)), load)
    assert found.mixed == mixed
    assert len(found.sequences) == 1


def test_each_sequence_has_weights_of_its_own(load: Loader) -> None:
    """Two sequences of one sample under different weights are not mixed; one under two is."""
    old, new = choice(weight_versions=[span("a", 0, 2)]), choice(weight_versions=[span("b", 0, 2)], index=1)
    both = choice(weight_versions=[span("a", 0, 1), span("b", 1, 2)], index=2)
    assert decoded(reply(old, new), load, call=replace(CALL, sequences=2)).mixed == ()
    assert decoded(reply(old, new, both), load, call=replace(CALL, sequences=3)).mixed == (("a", "b"),)


# -- images -----------------------------------------------------------------------------------------------------------

WITH_IMAGES: Final = replace(SPEC, prompt=b"10,9,12", images=(Image("png", b"iVBORw=="),))


def places(*lengths: int) -> dict[str, Any]:
    return {"image": [{"offset": 1, "length": length} for length in lengths]}


def test_images_that_were_taken(load: Loader) -> None:
    """The prompt's logprobs are those of the prompt that vLLM has made of them."""
    rows = [None, *({str(token): {"logprob": -float(token)}} for token in (9, 9, 9, 12))]
    told = {"mm_placeholders": places(3), "prompt_token_ids": [10, 9, 9, 9, 12], "prompt_logprobs": rows}
    spec = replace(WITH_IMAGES, prompt_logprobs=True)
    found = decoded(reply(choice(), **told), load, spec, replace(CALL, scores=True))
    assert found.scores is not None
    assert found.scores.logprobs is not None
    assert reals(found.scores.logprobs)[1:] == [-9.0, -9.0, -9.0, -12.0]
    last = replace(spec, prompt_logprobs_last_n=2)
    found = decoded(reply(choice(), **told), load, last, replace(CALL, scores=True))
    assert found.scores is not None
    assert found.scores.logprobs is not None
    assert [math.isnan(value) for value in reals(found.scores.logprobs)] == [True, True, True, False, False]


@pytest.mark.parametrize("taken", [None, {}, places(), places(3, 3)])
def test_images_that_were_left_out(load: Loader, taken: Any) -> None:
    """A vLLM that does not know the field samples from the text alone, and says nothing."""
    fault = fault_of(reply(choice(), mm_placeholders=taken, prompt_token_ids=[10, 9, 12]), load, WITH_IMAGES)
    assert (fault.kind, fault.category) == (FaultClass.REFUSED, Category.SERVER)
    assert "where 1 were sent" in fault.message


@pytest.mark.parametrize(
    "told",
    [
        {"mm_placeholders": 7},
        {"mm_placeholders": places(3)},
        {"mm_placeholders": {"image": "x"}, "prompt_token_ids": [10, 9, 12]},
        {"mm_placeholders": {"image": [None]}, "prompt_token_ids": [10, 9, 12]},
        {"mm_placeholders": {"image": [{"offset": 1}]}, "prompt_token_ids": [10, 9, 12]},
    ],
)
def test_images_that_are_not_told_as_vllm_tells_them(load: Loader, told: dict[str, Any]) -> None:
    assert fault_of(reply(choice(), **told), load, WITH_IMAGES).kind is FaultClass.AMBIGUOUS


def test_an_abort_with_images_is_an_abort(load: Loader) -> None:
    """D9"""
    assert fault_of(reply(choice(finish_reason="abort")), load, WITH_IMAGES).kind is FaultClass.ABORTED
