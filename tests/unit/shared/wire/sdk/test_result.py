from __future__ import annotations

import json
import math
import re
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from google.protobuf.internal import api_implementation
from hypothesis import given
from hypothesis import strategies as st

from shared.core.result import PromptScores, SampleResult, SequenceResult, StopReason, TopK
from shared.wire.sdk import result as proto

if TYPE_CHECKING:
    from collections.abc import Iterator


def i4(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def f4(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


TOPK = TopK(i4(7, 0, 0, 0), f4(-0.5, -99999.0, -99999.0, -99999.0), 2, 2)
RESULT = SampleResult(
    (
        SequenceResult(i4(100, 101), f4(-0.5, -1.5), StopReason.LENGTH, TOPK),
        SequenceResult(i4(5), f4(-0.25), StopReason.STOP),
    ),
    PromptScores(f4(math.nan, -2.0), TOPK),
    3,
)


# -- a reader of our own, of the wire format alone ------------------------------------------------------------------


def varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        if key & 7 == 0:
            value, at = varint(data, at)
            yield key >> 3, value
        else:
            assert key & 7 == 2
            length, at = varint(data, at)
            yield key >> 3, data[at : at + length]
            at += length


def as_bytes(value: int | bytes) -> bytes:
    assert isinstance(value, bytes)
    return value


def test_read_by_another_parser() -> None:
    """Numbers and encodings as in docs/wire.md, section 5."""
    sent = list(fields(proto.encode_sample_response(RESULT)))
    assert [number for number, _ in sent] == [1, 1, 2, 3, 4]
    first, second = (dict(fields(as_bytes(value))) for _, value in sent[:2])
    assert first[1] == 1  # STOP_REASON_LENGTH
    assert (first[2], first[3]) == (i4(100, 101), f4(-0.5, -1.5))
    assert dict(fields(as_bytes(first[4]))) == {1: TOPK.token_ids, 2: TOPK.logprobs, 3: 2, 4: 2}
    assert second == {2: i4(5), 3: f4(-0.25)}  # 0 is the default, and is not sent
    assert struct.unpack("<2f", as_bytes(sent[2][1]))[1] == -2.0
    assert sent[4] == (4, 3)


def test_golden_bytes() -> None:
    result = SampleResult((SequenceResult(i4(1), f4(-1.0), StopReason.LENGTH),))
    assert proto.encode_sample_response(result).hex() == "0a0e0801120401000000" + "1a04000080bf"


SIZES = st.sampled_from([0, 1, 31, 32, 33, 498, 499, 500, 501, 1022, 1023, 5000])


@given(
    tokens=SIZES,
    logprobs=st.none() | SIZES,
    reason=st.sampled_from(StopReason),
    cached=st.sampled_from([0, 1, 127, 128, 4095, 4096, 2**31 - 1]),
    more=st.sampled_from([{}, {"topk": TOPK}]),
    prompt=st.sampled_from([None, RESULT.prompt]),
)
def test_a_result_of_any_size_is_read_back(
    tokens: int, logprobs: int | None, reason: StopReason, cached: int, more: Any, prompt: PromptScores | None
) -> None:
    sizes = (4 * tokens, 4 * (tokens if logprobs is None else logprobs))
    sequence = SequenceResult(b"\x80" * sizes[0], b"\x7f" * sizes[1], reason, **more)
    result = SampleResult((sequence,), prompt, cached)
    assert proto.decode_sample_response(proto.encode_sample_response(result)) == result


def test_what_was_not_asked_for_is_absent() -> None:
    sent = dict(fields(proto.encode_sample_response(SampleResult((), PromptScores(None, None)))))
    assert sent == {}


def test_round_trip() -> None:
    encoded = proto.encode_sample_response(RESULT)
    assert proto.decode_sample_response(encoded) == RESULT
    assert proto.decode_sample_response(memoryview(encoded)) == RESULT


def test_cut_at_every_byte() -> None:
    encoded = proto.encode_sample_response(RESULT)
    for cut in range(len(encoded)):
        try:
            assert proto.decode_sample_response(encoded[:cut]) != RESULT
        except ValueError as error:
            assert "SampleResponse" in str(error)


def test_unknown_stop_reason() -> None:
    with pytest.raises(ValueError, match="stop_reason is 5"):
        proto.decode_sample_response(bytes.fromhex("0a020805"))


@given(st.binary(max_size=60))
def test_any_bytes_are_a_result_or_a_value_error(data: bytes) -> None:
    try:
        proto.decode_sample_response(data)
    except ValueError as error:
        assert str(error)


def test_runs_on_upb() -> None:
    """The pure Python implementation is a hundred times slower."""
    assert api_implementation.Type() == "upb"


def test_json_for_old_sdks() -> None:
    """null for NaN and for empty rows, pairs for the top-k; none of the keys that the SDK tests for first."""
    document = json.loads(proto.sample_response_json(memoryview(proto.encode_sample_response(RESULT))))
    assert document == {
        "type": "sample",
        "sequences": [
            {"stop_reason": "length", "tokens": [100, 101], "logprobs": [-0.5, -1.5]},
            {"stop_reason": "stop", "tokens": [5], "logprobs": [-0.25]},
        ],
        "prompt_logprobs": [None, -2.0],
        "topk_prompt_logprobs": [[[7, -0.5]], None],
        "prompt_cache_hit_tokens": 3,
    }
    assert not document.keys() & {"error", "status", "queue_state"}


def test_json_without_prompt_scores() -> None:
    plain = SampleResult(RESULT.sequences[1:])
    document = json.loads(proto.sample_response_json(proto.encode_sample_response(plain)))
    assert document.keys() == {"type", "sequences", "prompt_cache_hit_tokens"}


def test_the_proto_file_says_the_same() -> None:
    """The declarations that the code is built from, against the file that people read."""
    text = (Path(proto.__file__).parent / "tinker_public.proto").read_text()
    written = {
        name: tuple(
            (int(number), field, kind, label.strip())
            for label, kind, field, number in re.findall(r"(optional |repeated |)(\w+) (\w+) = (\d+);", inside)
        )
        for name, inside in re.findall(r"message (\w+) \{(.*?)\}", text, re.DOTALL)
    }
    assert written == proto.MESSAGES
    reasons = re.findall(r"STOP_REASON_(\w+) = (\d+);", text)
    assert reasons == [(reason.name, str(number)) for number, reason in enumerate(proto.STOP_REASONS)]
