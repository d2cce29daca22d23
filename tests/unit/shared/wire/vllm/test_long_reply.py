"""What is read in parts is what the whole says, or is left to who reads the whole."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.core.faults import Fault
from shared.core.model import SampleSpec, SamplingParams
from shared.wire import json_arrays
from shared.wire.vllm import Decoded, UpstreamCall, decode_reply, long_reply
from shared.wire.vllm import reply as vllm_reply
from tests.vllm_recordings import large_body, recording

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.skipif(json_arrays.piece_parser() is None, reason="pysimdjson is not installed")

SPEC: Final = SampleSpec(b"10,11,12", 3, 1, SamplingParams())
CALL: Final = UpstreamCall(b"", 1, False)
UNASKED: Final = ("text_offset", "tokens", "top_logprobs")
WHOLE_BYTES: Final = 2**30
# What ends an array, what stands between two elements, and what is escaped.
TEXTS: Final = st.text(st.sampled_from('"\\,:[]{}0é\0') | st.characters(codec="utf-8"), max_size=6) | st.sampled_from(
    ['],"top_logprobs":[', ']},"finish_reason":', ',"token_ids":[1]', '"logprobs":{"text_offset":[', '1},{"', '",']
)
NUMBERS: Final = st.floats(width=32, allow_nan=False, allow_infinity=False) | st.integers(-9999, 0)


@st.composite
def choices(draw: st.DrawFn) -> dict[str, Any]:
    values = draw(st.lists(NUMBERS, max_size=12))
    texts = [draw(TEXTS) for _ in values]
    return {
        "index": 0,
        "text": "".join(texts),
        "logprobs": {
            "text_offset": list(range(len(values))),
            "token_logprobs": values,
            "tokens": texts,
            "top_logprobs": [{text: value} for text, value in zip(texts, values, strict=True)],
        },
        "finish_reason": draw(st.sampled_from(["stop", "length"])),
        "stop_reason": draw(st.none() | TEXTS),
        "token_ids": [draw(st.integers(0, 2**31 - 1)) for _ in values],
        "prompt_token_ids": [10, 11, 12],
    }


def written(told: list[dict[str, Any]], *, ascii_only: bool = True) -> bytes:
    reply = {"id": "cmpl-1", "choices": told, "usage": {"completion_tokens": 1}, "metrics": None}
    return json.dumps(reply, separators=(",", ":"), ensure_ascii=ascii_only).encode()


def told_in_parts(reply: Any) -> Any:
    """All that can be asked for, as the json module tells it."""
    if isinstance(reply, np.ndarray):
        return reply.tolist()
    if not json_arrays.is_container(reply) and not isinstance(reply, long_reply.Assembled):
        return reply
    # An object is iterated by its keys.
    keys = list(reply) if hasattr(reply, "as_dict") else None
    if keys is None:
        return [told_in_parts(item) for item in reply]
    return {key: told_in_parts(reply[key]) for key in keys}


def told_whole(body: bytes) -> Any:
    reply = json.loads(body)
    for choice in reply["choices"]:
        choice["logprobs"].update(dict.fromkeys(UNASKED))
    return reply


@given(st.lists(choices(), min_size=1, max_size=3), st.booleans())
def test_a_reply_as_vllm_writes_it(told: list[dict[str, Any]], ascii_only: bool) -> None:
    body = written(told, ascii_only=ascii_only)
    assert told_in_parts(long_reply.load(body, len(told), WHOLE_BYTES)) == told_whole(body)


@given(st.lists(choices(), min_size=1, max_size=3), st.integers(1, 60))
def test_the_length_of_the_pieces_does_not_matter(told: list[dict[str, Any]], piece_bytes: int) -> None:
    """Unless one was cut within a text: then the whole is for another to read."""
    body = written(told)
    reply = long_reply.load(body, len(told), piece_bytes)
    assert reply is None or told_in_parts(reply) == told_whole(body)


@pytest.mark.parametrize("piece_bytes", [1, 1_000, 100_000])
def test_a_recorded_reply(piece_bytes: int) -> None:
    body = large_body()
    assert told_in_parts(long_reply.load(bytearray(body), 1, piece_bytes)) == told_whole(body)


def test_recorded_choices() -> None:
    told = recording("20_logprobs0_both_n4")
    assert told_in_parts(long_reply.load(told.body, 4, 10)) == told_whole(told.body)
    assert long_reply.load(told.body, 5, 10) is None


@pytest.mark.parametrize("asked", [1, 2, 3])
def test_more_choices_than_were_asked_for_are_no_reply(asked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_reply, "_LONG_BYTES", 0)
    body, call = recording("20_logprobs0_both_n4").body, UpstreamCall(b"", asked, False)
    found = decode_reply(call, SPEC, body)
    assert isinstance(found, Fault)
    assert found == decode_reply(call, SPEC, body, json_arrays.load)


@pytest.fixture
def always_in_parts(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], Decoded | Fault]:
    """What comes of a body, which is the same when it is long."""
    monkeypatch.setattr(vllm_reply, "_LONG_BYTES", 0)
    assert long_reply.load(two_tokens(), 1) is not None

    def outcome(body: bytes) -> Decoded | Fault:
        found = decode_reply(CALL, SPEC, body)
        assert found == decode_reply(CALL, SPEC, body, json_arrays.load)
        return found

    return outcome


@pytest.mark.parametrize(
    ("old", "new"),
    [
        # Within what is asked for.
        (b'"token_ids":[1,', b'"token_ids":[1.5,'),
        (b'"token_ids":[1,', b'"token_ids":[-1,'),
        (b'"token_ids":[1,', b'"token_ids":[99999999999,'),
        (b'"token_ids":[1,', b'"token_ids":[[1],'),
        (b'"token_ids":[1,', b'"token_ids":['),
        (b'"token_ids":[1,', b'"token_ids":[,1,'),
        (b'"token_ids":[1,2]', b'"token_ids":[1,2,]'),
        (b'"token_ids":[1,2]', b'"token_ids":null'),
        (b'"token_ids":[1,2]', b'"token_ids": [1,2,3]'),
        (b'"token_ids":[1,2]', b'"token_ids":7205759403792790000'),
        (b'"token_logprobs":[-0.5,', b'"token_logprobs":[null,'),
        (b'"token_logprobs":[-0.5,', b'"token_logprobs":[NaN,'),
        (b'"token_logprobs":[-0.5,', b'"token_logprobs":[-1e400,'),
        (b'"token_logprobs":[-0.5,', b'"token_logprobs":[-1e300,'),
        (b'"token_logprobs":[-0.5,', b'"token_logprobs":[-00.5,'),
        (b'"token_logprobs":[-0.5,-1.5]', b'"token_logprobs":[]'),
        # Where what is not asked for ends.
        (b'"tokens":["a","b"]', b'"tokens":["a","b"'),
        (b'"text_offset":[0,1]', b'"text_offset":[0,1'),
        (b'"text_offset":[0,1]', b'"text_offset":[0,1]]'),
        # Around it.
        (b'"finish_reason":"length"', b'"finish_reason":"abort"'),
        (b'"finish_reason":"length"', b'"finish_reason":"else"'),
        (b'"id":"cmpl-1"', b'"error":{"message":"no"}'),
        (b'"index":0', b'"index":1'),
        (b'"metrics":null}', b'"metrics":null'),
        (b'"metrics":null}', b'"metrics":null}}'),
    ],
)
def test_what_is_wrong_has_the_same_words(
    always_in_parts: Callable[[bytes], Decoded | Fault], old: bytes, new: bytes
) -> None:
    body = two_tokens()
    assert isinstance(always_in_parts(body), Decoded)
    assert old in body
    wrong = body.replace(old, new)
    assert isinstance(always_in_parts(wrong), Fault)
    for piece_bytes in (1, 2, 5):
        reply = long_reply.load(wrong, 1, piece_bytes)
        assert reply is None or isinstance(decode_reply(CALL, SPEC, wrong, lambda _, read=reply: read), Fault)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"tokens":["a",', b'"tokens":[a,'),
        (b'"tokens":["a",', b'"tokens":["\xff",'),
        (b'"tokens":["a",', b'"tokens":["]]]",'),
        (b'"top_logprobs":[{"a":-0.5}', b'"top_logprobs":[{"a":NaN}'),
        (b'"text_offset":[0,1]', b'"text_offset":[0,01]'),
    ],
)
def test_what_nobody_asks_for_is_passed_over(old: bytes, new: bytes) -> None:
    body = two_tokens()
    assert old in body
    for tried in (body, body.replace(old, new)):
        reply = long_reply.load(tried, 1)
        assert told_in_parts(reply) == told_whole(body)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"token_ids":[1,2]', b'"token_ids" : [ 1 , 2 ]'),
        (b'"token_logprobs":[-0.5,', b'"token_logprobs":[-5e-1 ,'),
        (b'"id":"cmpl-1"', b'"id":7205759403792790000'),
        (b'"id":"cmpl-1"', b'"id":"\\u0000"'),
        (b'"tokens":["a",', b'"tokens":["],\\"top_logprobs\\":[",'),
        (b'"metrics":null', b'"metrics":{"token_ids":[7],"logprobs":{"text_offset":[9]}}'),
        (b'"id":"cmpl-1"', b'"id":{"logprobs":{"text_offset":[9]}}'),
        (b'"stop_reason":null', b'"stop_reason":null,"token_ids":[1,2]'),
    ],
)
def test_what_is_unusual_is_read_all_the_same(
    always_in_parts: Callable[[bytes], Decoded | Fault], old: bytes, new: bytes
) -> None:
    body = two_tokens()
    assert old in body
    assert always_in_parts(body.replace(old, new)) == always_in_parts(body)


def test_what_looks_like_a_mark_is_none() -> None:
    assert long_reply.load(two_tokens().replace(b'"cmpl-1"', b"7205759403792790001"), 1) is None


def test_cut_at_every_byte(always_in_parts: Callable[[bytes], Decoded | Fault]) -> None:
    body = two_tokens()
    assert all(isinstance(always_in_parts(body[:cut]), Fault) for cut in range(len(body)))


@pytest.mark.parametrize("name", ["20_logprobs0_both_n4", "20_logprobs1_both", "20_logprobs1_tokids", "50_gen_n2_lp0"])
def test_what_is_asked_for_is_never_left_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told = recording(name)
    whole = decode_reply(told.call, told.spec, told.body)
    assert isinstance(whole, Decoded)
    for bound in ("_LONG_PROMPT_BYTES", "_LONG_BYTES"):
        monkeypatch.setattr(vllm_reply, bound, 0)
        assert decode_reply(told.call, told.spec, told.body) == whole


@given(st.lists(choices(), min_size=1, max_size=3), st.sampled_from(["10,11,12", "10,11", "1", "0,11,12", "10,11,123"]))
def test_a_prompt_that_is_repeated_is_left_out(told: list[dict[str, Any]], prompt: str) -> None:
    body = written(told)
    left = json.loads(long_reply.without_prompt(body, prompt.encode()))
    for choice in told:
        choice["prompt_token_ids"] = None if prompt == "10,11,12" else choice["prompt_token_ids"]
    assert left == json.loads(written(told))


@given(st.lists(choices(), min_size=1, max_size=3), st.sampled_from([b"10,11,12", b"10,11", b"11,12"]))
def test_of_what_is_read_in_parts_too(told: list[dict[str, Any]], prompt: bytes) -> None:
    body = written(told)
    expected = told_whole(body)
    for choice in expected["choices"]:
        choice["prompt_token_ids"] = None if prompt == b"10,11,12" else choice["prompt_token_ids"]
    assert told_in_parts(long_reply.load(body, len(told), WHOLE_BYTES, prompt)) == expected


@pytest.mark.parametrize("sequences", [1, 2])
@pytest.mark.parametrize("repeated", [True, False])
def test_a_body_that_is_long_by_its_prompt_alone_is_none(
    sequences: int, repeated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = list(range(10_000, 50_000))
    spec = SampleSpec(b",".join(b"%d" % token for token in ids), len(ids), sequences, SamplingParams())
    call = UpstreamCall(b"", sequences, False)
    one = json.loads(two_tokens())["choices"][0]
    told = [{**one, "index": index, "prompt_token_ids": ids if repeated else None} for index in range(sequences)]
    read_in_parts: list[int] = []
    monkeypatch.setattr(long_reply, "load", lambda body, *_, **__: read_in_parts.append(len(body)))
    found = decode_reply(call, spec, written(told))
    assert isinstance(found, Decoded)
    assert found == decode_reply(call, spec, written(told), json_arrays.load)
    assert not read_in_parts


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"prompt_token_ids":[10,11,12]', b'"prompt_token_ids":[10,11,12'),
        (b'"prompt_token_ids":[10,11,12]', b'"prompt_token_ids":[10,11,12]]'),
        (b',"prompt_token_ids":[10,11,12]', b',"prompt_token_ids":[10,11,12],'),
        (b',"prompt_token_ids":[10,11,12]', b'"prompt_token_ids":[10,11,12]'),
        (b'"text":"ab"', b'"text":"ab,"prompt_token_ids":[10,11,12]"'),
        (b'"prompt_token_ids":[10,11,12]', b'"prompt_token_ids": [10,11]'),
        (b'"prompt_token_ids":[10,11,12]', b'"prompt_token_ids":[10,11,12],"prompt_token_ids":[10,11,12]'),
        (b'"text":"ab"', b'"text":",\\"prompt_token_ids\\":[10,11,12]"'),
    ],
)
def test_no_prompt_hides_what_is_wrong(old: bytes, new: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_reply, "_LONG_PROMPT_BYTES", 0)
    body = two_tokens()
    assert old in body
    told = body.replace(old, new)
    assert decode_reply(CALL, SPEC, told) == decode_reply(CALL, SPEC, told, json_arrays.load)
    assert isinstance(decode_reply(CALL, SPEC, told), Decoded) == is_json(told)


def is_json(body: bytes) -> bool:
    try:
        json.loads(body)
    except ValueError:
        return False
    return True


def two_tokens() -> bytes:
    scored = {
        "text_offset": [0, 1],
        "token_logprobs": [-0.5, -1.5],
        "tokens": ["a", "b"],
        "top_logprobs": [{"a": -0.5}, {"b": -1.5}],
    }
    choice = {"index": 0, "text": "ab", "logprobs": scored, "finish_reason": "length", "stop_reason": None}
    return written([{**choice, "token_ids": [1, 2], "prompt_token_ids": [10, 11, 12]}])
