from __future__ import annotations

import gc
import json
import math
import struct
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from shared.core.faults import Fault, FaultClass
from shared.core.model import SampleSpec, SamplingParams
from shared.core.result import StopReason
from shared.wire import json_arrays
from shared.wire.vllm import Decoded, UpstreamCall, combine, decode_reply, plan_calls
from tests.vllm_recordings import large_body, recording

SPEC = SampleSpec(b"10,11,12", 3, 1, SamplingParams(max_tokens=4))
CALL = UpstreamCall(b"", 1, False)
SCORES = UpstreamCall(b"", 0, True)

Loader = Callable[[bytes | bytearray], Any]


@pytest.fixture(params=sorted(json_arrays.LOADERS))
def load(request: pytest.FixtureRequest) -> Loader:
    return json_arrays.LOADERS[request.param]


def choice(tokens: Any = (5, 6), logprobs: Any = (-0.5, -1.5), finish: Any = "length", **more: Any) -> dict[str, Any]:
    return {
        "index": 0,
        "logprobs": {"token_logprobs": logprobs, "tokens": [], "top_logprobs": []},
        "finish_reason": finish,
        "token_ids": tokens,
        "prompt_logprobs": None,
        **more,
    }


def reply(*choices: dict[str, Any], cached: int = 0) -> bytes:
    usage = {"prompt_tokens_details": {"cached_tokens": cached}}
    return json.dumps({"choices": choices, "usage": usage}).encode()


def compact(told: dict[str, Any]) -> bytes:
    """As vLLM writes it: what the ways of decoding of short and of long replies look for."""
    logprobs = {
        "text_offset": [],
        "token_logprobs": told["logprobs"]["token_logprobs"],
        "tokens": [],
        "top_logprobs": [],
    }
    return json.dumps({"choices": [told | {"logprobs": logprobs}]}, separators=(",", ":")).encode()


def flattened(nested: list[Any]) -> list[Any]:
    return [leaf for item in nested for leaf in (flattened(item) if isinstance(item, list) else [item])]


def fault_of(body: bytes, load: Loader, spec: SampleSpec = SPEC, call: UpstreamCall = CALL) -> Fault:
    found = decode_reply(call, spec, body, load)
    assert isinstance(found, Fault), found
    return found


def decoded(body: bytes, load: Loader, spec: SampleSpec = SPEC, call: UpstreamCall = CALL) -> Decoded:
    found = decode_reply(call, spec, body, load)
    assert isinstance(found, Decoded), found
    return found


def ints(data: bytes) -> list[int]:
    return [value for (value,) in struct.iter_unpack("<i", data)]


def reals(data: bytes) -> list[float]:
    return [value for (value,) in struct.iter_unpack("<f", data)]


# -- recorded replies -------------------------------------------------------------------------------------------------

WHOLE = [
    "20_logprobs0_both_n4",
    "20_logprobs1_both",
    "20_logprobs1_tokids",
    "21_max1",
    "21_max_null",
    "21_min_tokens6",
    "21_seed7_n1",
    "21_seed7_n2",
    "21_seed8_n1",
    "21_temp0",
    "22_logit_bias_eos_first",
    "22_stop_at_max",
    "22_stop_str_first",
    "22_stop_str_mid",
    "22_stop_str_span",
    "22_stop_str_tokenboundary",
    "22_stop_token_ids",
    "23_xreqid",
    "23_xreqid_dup",
    "24_gen_a1",
    "30_prompt_plus_maxtok_too_long",
]


@pytest.mark.parametrize("name", WHOLE)
def test_recorded_completions(name: str, load: Loader) -> None:
    told = recording(name)
    found = decoded(told.body, load, told.spec, told.call)
    choices = json.loads(told.body)["choices"]
    assert len(found.sequences) == len(choices)
    for sequence, said in zip(found.sequences, choices, strict=True):
        ids = [int(text.removeprefix("token_id:")) for text in said["logprobs"]["tokens"]]
        assert ints(sequence.tokens) == ids
        assert reals(sequence.logprobs) == said["logprobs"]["token_logprobs"]
        assert sequence.stop_reason.value == said["finish_reason"]


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("32_inflight_pause_abort", FaultClass.ABORTED, "after 131 tokens"),
        ("33_sigtermdrain_later_2_0.1s", FaultClass.NEVER_EXECUTED, "after 0 tokens"),
        ("20_plain_n1", FaultClass.AMBIGUOUS, "without logprobs"),
        ("20_logprobs0", FaultClass.AMBIGUOUS, "'ense' instead of token_id:N"),
        ("23_echo", FaultClass.AMBIGUOUS, "logprobs that are not all numbers"),
        ("23_multi_prompt_ids", FaultClass.AMBIGUOUS, "2 choices where 1"),
        ("35_nan_nologprobs", FaultClass.AMBIGUOUS, "without logprobs"),
    ],
)
def test_recorded_200s_that_are_no_result(name: str, kind: FaultClass, words: str, load: Loader) -> None:
    """D9, D16: an aborted reply is never a result, and its tokens say whether anything ran."""
    told = recording(name)
    spec = told.spec if name != "23_multi_prompt_ids" else SPEC
    found = fault_of(told.body, load, spec, told.call)
    assert found.kind is kind
    assert words in found.message


def test_large_reply(load: Loader) -> None:
    body = large_body()
    sequence = decoded(body, load).sequences[0]
    said = json.loads(body)["choices"][0]
    assert ints(sequence.tokens) == said["token_ids"]
    assert reals(sequence.logprobs) == said["logprobs"]["token_logprobs"]


def test_cut_at_every_byte(load: Loader) -> None:
    """D3: whatever the place, a fault; never another exception."""
    told = recording("20_logprobs1_both")
    for cut in range(len(told.body)):
        assert fault_of(told.body[:cut], load, told.spec, told.call).kind is FaultClass.AMBIGUOUS


def test_arrays_outlive_their_parser(load: Loader) -> None:
    """D1"""
    first, second = recording("21_seed7_n1"), recording("21_seed8_n1")
    values = json_arrays.floats(load(first.body)["choices"][0]["logprobs"]["token_logprobs"])
    expected = json.loads(first.body)["choices"][0]["logprobs"]["token_logprobs"]
    for _ in range(50):
        load(second.body)
        gc.collect()
    assert values.tolist() == expected


# -- what is wrong is named -------------------------------------------------------------------------------------------


def test_clamped_logprobs_pass(load: Loader) -> None:
    """D3"""
    found = decoded(reply(choice(logprobs=(-9999.0, 0))), load)
    assert reals(found.sequences[0].logprobs) == [-9999.0, 0.0]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "an empty body"),
        (b" \n", "an empty body"),
        (b"<!DOCTYPE html><html></html>", "HTML"),
        (reply(choice(logprobs=(-math.inf, -1.0))), "NaN or Infinity"),
        (reply(choice(logprobs=(math.nan, -1.0))), "NaN or Infinity"),
        (reply(choice(logprobs=(None, -1.0))), "logprobs that are not all numbers"),
        (reply(choice(logprobs=("-1", -1.0))), "logprobs that are not all numbers"),
        (reply(choice(logprobs=(True, -1.0))), "logprobs that are not all numbers"),
        (reply(choice(logprobs=None)), "logprobs that are not all numbers"),
        (reply(choice(logprobs=(-1e300, -1.0))), "32-bit float"),
        (reply(choice() | {"logprobs": None}), "without logprobs"),
        (b"[1, 2]", "no JSON object"),
        (b"null", "no JSON object"),
        (b"\xff\xfe", "no JSON object"),
    ],
)
def test_logprobs_are_never_made_up(body: bytes, words: str, load: Loader) -> None:
    """D3"""
    found = fault_of(body, load)
    assert found.kind is FaultClass.AMBIGUOUS
    assert words in found.message


@pytest.mark.parametrize(
    ("tokens", "logprobs"), [((5, 6, 7), (-0.5, -1.5)), ((5,), (-0.5, -1.5)), ((), (-0.5,)), ((5,), ())]
)
def test_lengths_that_differ_name_both(tokens: Any, logprobs: Any, load: Loader) -> None:
    """D4"""
    message = fault_of(reply(choice(tokens, logprobs)), load).message
    assert f"{len(tokens)} token ids and {len(logprobs)} logprobs" in message


def test_fewer_choices_name_both(load: Loader) -> None:
    """D4"""
    body = reply(*({**choice(), "index": index} for index in range(3)))
    assert (
        "3 choices where 4" in fault_of(body, load, replace(SPEC, num_samples=4), UpstreamCall(b"", 4, False)).message
    )


@pytest.mark.parametrize("indices", [(0, 0), (1, 2), (0, 2), ("0", "1"), (None, 0)])
def test_each_index_once(indices: tuple[Any, Any], load: Loader) -> None:
    """D4, D14"""
    body = reply(*({**choice(), "index": index} for index in indices))
    found = fault_of(body, load, replace(SPEC, num_samples=2), UpstreamCall(b"", 2, False))
    assert found.kind is FaultClass.AMBIGUOUS


def test_choices_are_put_in_order(load: Loader) -> None:
    body = reply({**choice((9,), (-0.9,)), "index": 1}, {**choice((8,), (-0.8,)), "index": 0})
    found = decoded(body, load, replace(SPEC, num_samples=2), UpstreamCall(b"", 2, False))
    assert [ints(sequence.tokens) for sequence in found.sequences] == [[8], [9]]


@pytest.mark.parametrize("token", [1.5, 1.0, 2**64, "5", None, True])
def test_token_ids_never_wrap(token: Any, load: Loader) -> None:
    """D13"""
    assert fault_of(reply(choice((token, 6))), load).kind is FaultClass.AMBIGUOUS


LISTS: Final[list[list[Any]]] = [
    [7, [8]],
    [7, [8, 9]],
    [7, [8, 9], []],
    [[7], [8]],
    [[], 7, 8],
    [[7, 8]],
    [7, [None]],
    [[]],
]


@pytest.mark.parametrize(
    "impossible",
    [
        *(choice((token, 6)) for token in (2**40, 2**31, -1, 2**63)),
        *(choice(nested, [-0.5] * len(flattened(nested))) for nested in LISTS),
        *(choice([5] * len(flattened(nested)), nested) for nested in LISTS),
        choice((5, 6), (0.0011, -1.0)),
        choice((5, 6), (-1.0, 1e300)),
        choice((5, 6, 7, 8, 9), (-1.0,) * 5),
    ],
    ids=str,
)
@pytest.mark.parametrize("way", ["short", "whole", "orjson", "in parts"])
def test_a_reply_that_no_vllm_gives_is_executed_again(impossible: dict[str, Any], way: str) -> None:
    """Each way of decoding finds it: a nested list is not flattened, and nothing is cut to size."""
    load = json_arrays.LOADERS[{"whole": "simdjson", "orjson": "orjson"}[way]] if way in ("whole", "orjson") else None
    body = compact(impossible | {"text": "x" * (200_000 if way == "in parts" else 0)})
    found = decode_reply(replace(CALL, max_tokens=4), SPEC, body, load)
    assert isinstance(found, Fault), found
    assert found.kind is FaultClass.WRONG_REPLY


@pytest.mark.parametrize("way", ["short", "whole", "in parts"])
def test_a_logprob_above_zero_by_rounding_is_none(way: str) -> None:
    load = json_arrays.LOADERS["simdjson"] if way == "whole" else None
    body = compact(choice((5, 6), (0.0009, 0.0), text="x" * (200_000 if way == "in parts" else 0)))
    found = decode_reply(replace(CALL, max_tokens=2), SPEC, body, load)
    assert isinstance(found, Decoded), found
    assert reals(found.sequences[0].logprobs) == pytest.approx([0.0009, 0.0])


def test_largest_token_id(load: Loader) -> None:
    assert ints(decoded(reply(choice((2**31 - 1, 0))), load).sequences[0].tokens) == [2**31 - 1, 0]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"choices": []}', "0 choices where 1"),
        (b'{"error": {"message": "engine on fire"}}', "an error inside: engine on fire"),
        (b'{"error": "engine on fire", "choices": []}', "an error inside: engine on fire"),
        (b"{}", "no completion"),
        (b'{"choices": null}', "no completion"),
        (b'{"choices": {"a": 1}}', "no completion"),
        (b'{"choices": [null]}', "no completion"),
        (b'{"choices": [{}]}', "no completion"),
    ],
)
def test_no_success_without_sequences(body: bytes, words: str, load: Loader) -> None:
    """D14"""
    found = fault_of(body, load)
    assert found.kind is FaultClass.AMBIGUOUS
    assert words in found.message


@pytest.mark.parametrize(
    ("finish", "reason"), [("stop", StopReason.STOP), ("length", StopReason.LENGTH), ("repetition", StopReason.STOP)]
)
def test_stop_reasons(finish: str, reason: StopReason, load: Loader) -> None:
    assert decoded(reply(choice(finish=finish)), load).sequences[0].stop_reason is reason


@pytest.mark.parametrize("finish", ["error", "tool_calls", "", None, 3])
def test_other_stop_reasons_are_named(finish: Any, load: Loader) -> None:
    assert repr(finish) in fault_of(reply(choice(finish=finish)), load).message


@pytest.mark.parametrize(
    ("choices", "kind"),
    [
        ([choice((5,), (-0.5,), "abort")], FaultClass.ABORTED),
        ([choice((), (), "abort")], FaultClass.NEVER_EXECUTED),
        ([choice(None, (), "abort")], FaultClass.NEVER_EXECUTED),
        ([choice(None, None, "abort") | {"logprobs": None}], FaultClass.NEVER_EXECUTED),
        ([choice(None, (-0.5,), "abort")], FaultClass.ABORTED),
        ([choice((5, 6), (-0.5, -0.6), "stop"), {**choice((), (), "abort"), "index": 1}], FaultClass.ABORTED),
    ],
)
def test_abort_is_never_delivered(choices: list[dict[str, Any]], kind: FaultClass, load: Loader) -> None:
    """D9, D16, D17"""
    found = fault_of(
        reply(*choices), load, replace(SPEC, num_samples=len(choices)), UpstreamCall(b"", len(choices), False)
    )
    assert found.kind is kind
    assert not found.upstream_down


def test_ids_from_texts_where_there_is_no_list(load: Loader) -> None:
    """Older servers know `return_tokens_as_token_ids` only."""
    said = choice()
    del said["token_ids"]
    said["logprobs"]["tokens"] = ["token_id:7", "token_id:8"]
    assert ints(decoded(reply(said), load).sequences[0].tokens) == [7, 8]


@pytest.mark.parametrize(
    "text",
    ["token_id:", "token_id:-1", "token_id:1.0", "token_id:2147483648", "token_id:" + "9" * 5000, "token_id:٣", "x", 5],
)
def test_texts_that_are_no_ids(text: Any, load: Loader) -> None:
    """D13"""
    said = choice(None)
    said["logprobs"]["tokens"] = [text, "token_id:8"]
    message = fault_of(reply(said), load).message
    assert "instead of token_id:N" in message or "token id above 2**31 - 1" in message


def test_lean_servers_may_leave_out_what_was_not_asked_for(load: Loader) -> None:
    body = json.dumps(
        {"choices": [{"index": 0, "finish_reason": "stop", "token_ids": [5], "logprobs": {"token_logprobs": [-1.0]}}]}
    ).encode()
    assert decoded(body, load).cached_tokens == 0


DETAILS: list[Any] = [None, 7, [], {"cached_tokens": True}, {"cached_tokens": -1}, {"cached_tokens": 2**31}]


@pytest.mark.parametrize("usage", ["x", 7, [], [1], *({"prompt_tokens_details": details} for details in DETAILS)])
def test_no_generation_is_thrown_away_for_what_is_told_of_the_cache(load: Loader, usage: Any) -> None:
    body = json.dumps({"choices": [choice()], "usage": usage}).encode()
    cached = decoded(body, load).cached_tokens
    assert (type(cached), cached) == (int, 0)


@settings(max_examples=200)
@given(
    body=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["choices", "index", "logprobs", "token_ids", "finish_reason", "usage", "error"]), inner
            )
        ),
        max_leaves=20,
    )
)
def test_any_json_is_decoded_or_a_fault(body: Any) -> None:
    for load in json_arrays.LOADERS.values():
        assert isinstance(decode_reply(CALL, SPEC, json.dumps(body).encode(), load), Decoded | Fault)


# -- top-k and prompt scores ------------------------------------------------------------------------------------------


def topk_choice(*rows: Any) -> dict[str, Any]:
    said = choice(tuple(range(len(rows))), (-1.0,) * len(rows))
    said["logprobs"]["top_logprobs"] = rows
    return said


def test_topk_leaves_out_the_sampled_extra(load: Loader) -> None:
    rows = [
        {"token_id:0": -9.0, "token_id:4": -0.1, "token_id:5": -0.2},
        {"token_id:1": -0.5, "token_id:4": -0.4},
        {"token_id:2": -0.25},
    ]
    topk = decoded(reply(topk_choice(*rows)), load, replace(SPEC, topk_sample_logprobs=2)).sequences[0].topk
    assert topk is not None and (topk.k, topk.length) == (2, 3)
    assert ints(topk.token_ids) == [4, 5, 4, 1, 2, 0]
    assert reals(topk.logprobs) == pytest.approx([-0.1, -0.2, -0.4, -0.5, -0.25, -99999.0])


@pytest.mark.parametrize(
    "rows", [[], [{"token_id:1": -1.0}], [None, None], [{"a": -1.0}] * 2, [{"token_id:1": None}] * 2]
)
def test_topk_that_does_not_fit(rows: list[Any], load: Loader) -> None:
    """D3, D4"""
    said = choice()
    said["logprobs"]["top_logprobs"] = rows
    assert fault_of(reply(said), load, replace(SPEC, topk_sample_logprobs=1)).kind is FaultClass.AMBIGUOUS


def entry(logprob: Any, rank: int = 1) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": "x"}


PROMPT_ROWS = [None, {"99": entry(-0.1), "11": entry(-2.0, 7)}, {"12": entry(-0.5)}]
SCORED = replace(SPEC, prompt_logprobs=True)


def scores_reply(rows: Any) -> bytes:
    return reply(choice(prompt_logprobs=rows))


def test_prompt_scores_are_picked_by_token_id(load: Loader) -> None:
    """D6"""
    scores = decoded(scores_reply(PROMPT_ROWS), load, SCORED, SCORES).scores
    assert scores is not None and scores.logprobs is not None and scores.topk is None
    first, *rest = reals(scores.logprobs)
    assert math.isnan(first)
    assert rest == [-2.0, -0.5]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (PROMPT_ROWS[:-1], "2 prompt_logprobs for 3 prompt tokens"),
        ([*PROMPT_ROWS, PROMPT_ROWS[-1]], "4 prompt_logprobs for 3 prompt tokens"),
        (None, "no prompt_logprobs for 3 prompt tokens"),
        ([None, {"99": entry(-0.1)}, {"12": entry(-0.5)}], "position 1"),
        ([None, None, {"12": entry(-0.5)}], "position 1"),
        ([None, {"11": entry(None)}, {"12": entry(-0.5)}], "the logprob None"),
        ([None, {"11": {}}, {"12": entry(-0.5)}], "logprob"),
    ],
)
def test_prompt_scores_that_do_not_fit(rows: Any, words: str, load: Loader) -> None:
    """D3, D6"""
    found = fault_of(scores_reply(rows), load, SCORED, SCORES)
    assert found.kind is FaultClass.AMBIGUOUS
    assert words in found.message


@pytest.mark.parametrize(
    "row",
    [
        None,
        {},
        {"x": entry(-1.0)},
        {"-1": entry(-1.0)},
        {"12": entry("-1")},
        {"12": entry(-1e300)},
        {"12": None},
    ],
)
def test_prompt_topk_that_does_not_fit(row: Any, load: Loader) -> None:
    """D3, D13"""
    spec = replace(SPEC, topk_prompt_logprobs=2)
    found = fault_of(scores_reply([*PROMPT_ROWS[:2], row]), load, spec, SCORES)
    assert found.kind is FaultClass.AMBIGUOUS


def test_prompt_topk_alone_brings_no_logprobs(load: Loader) -> None:
    spec = replace(SPEC, topk_prompt_logprobs=2)
    scores = decoded(scores_reply(PROMPT_ROWS), load, spec, SCORES).scores
    assert scores is not None and scores.logprobs is None and scores.topk is not None
    assert ints(scores.topk.token_ids) == [0, 0, 99, 11, 12, 0]
    assert reals(scores.topk.logprobs) == pytest.approx([-99999, -99999, -0.1, -2.0, -0.5, -99999])


def test_last_n_masks_what_is_before(load: Loader) -> None:
    spec = replace(SCORED, prompt_logprobs_last_n=1, topk_prompt_logprobs=1)
    scores = decoded(scores_reply(PROMPT_ROWS), load, spec, SCORES).scores
    assert scores is not None and scores.logprobs is not None and scores.topk is not None
    assert np.isnan(np.frombuffer(scores.logprobs, "<f4")).tolist() == [True, True, False]
    assert ints(scores.topk.token_ids) == [0, 0, 12]
    assert reals(scores.topk.logprobs) == [-99999.0, -99999.0, -0.5]


def test_scores_repeated_in_every_choice_are_taken_once(load: Loader) -> None:
    """D6"""
    spec = replace(SCORED, num_samples=2)
    body = reply(*({**choice(prompt_logprobs=PROMPT_ROWS), "index": index} for index in range(2)))
    found = decoded(body, load, spec, UpstreamCall(b"", 2, True))
    assert found.scores is not None and found.scores.logprobs is not None
    assert len(found.scores.logprobs) == 4 * spec.prompt_tokens


def test_recorded_scores(load: Loader) -> None:
    told = recording("20_plp1")
    scores = decoded(told.body, load, told.spec, SCORES).scores
    rows = json.loads(told.body)["choices"][0]["prompt_logprobs"]
    assert scores is not None and scores.logprobs is not None and scores.topk is not None
    own = [row[str(token)]["logprob"] for token, row in zip(told.asked["prompt"][1:], rows[1:], strict=True)]
    assert reals(scores.logprobs)[1:] == own
    best = [next(int(token) for token, said in row.items() if said["rank"] == 1) for row in rows[1:]]
    assert ints(scores.topk.token_ids) == [0, *best]


# -- putting replies together -----------------------------------------------------------------------------------------


def test_greedy_is_generated_once_and_given_n_times(load: Loader) -> None:
    """D12"""
    spec = replace(SPEC, num_samples=4, params=SamplingParams(max_tokens=4, temperature=0.0))
    (call,) = plan_calls(spec, "tiny", 100)
    result = combine(spec, [decoded(reply(choice()), load, spec, call)])
    assert len(result.sequences) == 4
    assert len(set(result.sequences)) == 1


def test_scores_asked_apart_join_the_sequences(load: Loader) -> None:
    spec = replace(SCORED, num_samples=2)
    scores_call, sample_call = plan_calls(spec, "tiny", 100)
    parts = [
        decoded(scores_reply(PROMPT_ROWS), load, spec, scores_call),
        decoded(reply(choice(), {**choice(), "index": 1}, cached=2), load, spec, sample_call),
    ]
    result = combine(spec, parts)
    assert len(result.sequences) == 2
    assert result.prompt == parts[0].scores
    assert result.prompt_cache_hit_tokens == 2
