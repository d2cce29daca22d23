"""What the short way tells is what the long one tells, and it is taken for what vLLM writes."""

from __future__ import annotations

import json
from typing import Any, Final
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.core.model import SampleSpec, SamplingParams
from shared.wire import json_arrays
from shared.wire.vllm import Decoded, UpstreamCall, decode_reply, reply, short_reply
from tests.fuzz.damage import damaged
from tests.vllm_recordings import recording

pytestmark = pytest.mark.skipif("simdjson" not in json_arrays.LOADERS, reason="there is no pysimdjson to be quick with")

SPEC: Final = SampleSpec(b"10,11,12", 3, 2, SamplingParams(max_tokens=4))
CALLS: Final = (UpstreamCall(b"", 1, False), UpstreamCall(b"", 2, False))
# 2**31 / 2**32: where what is looked at of a number begins to matter. 1e34 is 2**113.
INTEGERS: Final = st.integers(0, 9) | st.sampled_from(
    [-1, 2**31 - 1, 2**31, 2**32, 2**32 + 5, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**31), -(2**63)]
)
REALS: Final = (
    st.floats(-50, 0)
    | st.sampled_from([0, -1, -0.0, 1e33, -1e34, 1.1e34, 3.4028234663852886e38, -3.4028235e38, 3.5e38, -1e300, 5e-324])
    | INTEGERS
)
ODD: Final = st.sampled_from([None, True, "1", [], [1], {}, {"a": 1}, 1.5])


def lists(items: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(items, max_size=3) | st.lists(items | ODD, max_size=3) | ODD


CHOICES: Final = st.fixed_dictionaries(
    {
        "index": st.integers(0, 2) | st.sampled_from([0.0, True, None, "0"]),
        "logprobs": st.fixed_dictionaries({"token_logprobs": lists(REALS), "tokens": st.just(["token_id:1"])})
        | st.sampled_from([None, 1, []]),
        "finish_reason": st.sampled_from(["stop", "length", "repetition", "abort", "error", None, 1]),
        "token_ids": lists(INTEGERS),
    }
)


def require_same(body: bytes, call: UpstreamCall, spec: SampleSpec = SPEC) -> None:
    assert decode_reply(call, spec, body) == decode_reply(call, spec, body, json_arrays.load)


@settings(deadline=None)
@given(
    choices=st.lists(CHOICES, max_size=3),
    call=st.sampled_from(CALLS),
    more=st.dictionaries(st.sampled_from(["error", "choices", "usage", "x"]), ODD, max_size=1),
)
def test_any_choices(choices: list[Any], call: UpstreamCall, more: dict[str, Any]) -> None:
    require_same(json.dumps({"choices": choices, **more}).encode(), call)


@settings(deadline=None)
@given(
    tokens=st.lists(INTEGERS, max_size=3),
    logprobs=st.lists(REALS, max_size=3),
    reason=st.sampled_from(["stop", "length", "repetition"]),
)
def test_any_numbers(tokens: list[int], logprobs: list[float], reason: str) -> None:
    told = {"index": 0, "logprobs": {"token_logprobs": logprobs}, "finish_reason": reason, "token_ids": tokens}
    require_same(json.dumps({"choices": [told]}).encode(), CALLS[0])


RECORDED: Final = [
    recording(name) for name in ("21_max1", "22_stop_str_mid", "20_n4", "21_temp0", "20_logprobs1_tokids")
]


@settings(deadline=None)
@given(damaged(*(one.body for one in RECORDED)), st.sampled_from(RECORDED))
def test_damaged_replies(body: bytes, asked: Any) -> None:
    require_same(body, asked.call, asked.spec)


def test_the_prompt_is_left_out_of_what_is_parsed() -> None:
    tokens = list(range(1, 2000))
    spec = SampleSpec(",".join(map(str, tokens)).encode(), len(tokens), 1, SamplingParams())
    told = {"index": 0, "logprobs": {"token_logprobs": [-1]}, "finish_reason": "stop", "token_ids": [7]}
    for prompt in (tokens, tokens[:-1], None):
        for more in ({}, {"error": "no"}, {"error": None}):
            document_ = {"choices": [{**told, "prompt_token_ids": prompt}], **more}
            require_same(json.dumps(document_, separators=(",", ":")).encode(), CALLS[0], spec)


def test_what_vllm_writes_is_read_in_the_short_way() -> None:
    one = recording("21_max1")
    with mock.patch.object(reply, "_decode_whole", side_effect=AssertionError):
        assert isinstance(decode_reply(one.call, one.spec, one.body), Decoded)


def test_one_reply_after_the_other() -> None:
    """The parser is one for all: nothing of a reply that was no good may stay alive."""
    one = recording("21_max1")
    for body in (b"", b"{", b"[]", b'{"choices":[{}]}', b'{"choices":[{"logprobs":{"token_logprobs":[[]]}}]}'):
        decode_reply(one.call, one.spec, body)
        assert short_reply.load(one.body) is not None


def test_a_reply_that_is_still_read_elsewhere_takes_the_long_way() -> None:
    one = recording("21_max1")
    held = short_reply.load(one.body)
    assert held is not None
    require_same(one.body, one.call, one.spec)
    assert short_reply.load(one.body) is None
