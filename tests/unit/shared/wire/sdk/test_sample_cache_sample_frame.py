from __future__ import annotations

import json
from typing import Any, Final
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.bench.load import requests
from gateway.bench.load.workload import Workload, sample
from shared.core.errors import BadRequest
from shared.wire.sdk import sample as tinker_sample
from shared.wire.sdk.sample import SampleCall, decode_sample, decode_whole
from shared.wire.sdk.sample_cache import MARKS, cut, marked
from tests.fuzz.damage import damaged

WORKLOAD: Final = Workload(seed=1, model="sim/tiny", prompt_tokens=4, max_tokens=64)


def sdk_body(index: int) -> bytes:
    return requests.asample_body(WORKLOAD, sample(WORKLOAD, index), "gwss-x", index)


def spaced(body: bytes) -> bytes:
    """As httpx before 0.28 writes it."""
    return json.dumps(json.loads(body)).encode()


def outcome(decode: Any, body: bytes) -> SampleCall | str:
    try:
        call: SampleCall = decode(body)
    except BadRequest as error:
        return str(error)
    return call


def require_same(body: bytes) -> None:
    whole = outcome(decode_whole, body)
    # The frame is read when it comes again, and then it is known.
    for _ in range(3):
        assert outcome(decode_sample, body) == whole


def frame_of(body: bytes) -> Any:
    parts = cut(body)
    assert parts is not None
    return parts[0]


# -- cutting ----------------------------------------------------------------------------------------------------------


def test_a_client_has_one_frame() -> None:
    assert len({frame_of(sdk_body(index)) for index in range(20)}) == 1
    assert len({frame_of(spaced(sdk_body(index))) for index in range(20)}) == 1


def test_what_is_cut_out() -> None:
    assert cut(b'{"tokens":[1,2],"seed":3,"x":{"tokens":[]},"max_tokens":0}') == (
        (b'{"tokens":[],', b"seed", b',"x":{"tokens":[]},', b"max_tokens", b"}"),
        [b"1,2", b""],
        [b"3", b"0"],
    )
    assert cut(b'{"tokens": [1, 2], "seq_id": 3}') == ((b'{"tokens": [], ', b"seq_id", b"}"), [b"1,2"], [b"3"])


@pytest.mark.parametrize("number", ["-1", "01", "1.0", "1e3", "null", '"1"', "1 ", "9" * 19, "[1]"])
def test_a_number_that_is_not_spelled_plainly_stays(number: str) -> None:
    body = f'{{"tokens":[1],"seq_id":{number}}}'.encode()
    parts = cut(body)
    assert parts is not None
    assert parts[2] == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b'{"tokens" :[1]}',
        b'{"tokens":[1',
        b'{"tokens":[1],"x":"' + b"x" * 4096 + b'"}',
        b"[" + b",".join([b'{"tokens":[1]}'] * 65) + b"]",
        b'{"tokens":[1],' + b",".join([b'"seed":1'] * 4) + b"}",
    ],
)
def test_another_form_is_not_cut(body: bytes) -> None:
    assert cut(body) is None


def test_marks_stand_in_the_gaps() -> None:
    body, prompt = marked(frame_of(sdk_body(0))) or (b"", b"")
    call = decode_whole(body)
    assert call.spec.prompt == prompt
    assert call.seq_id == MARKS[b"seq_id"]
    assert (call.spec.params.max_tokens, call.spec.params.seed) == (MARKS[b"max_tokens"], MARKS[b"seed"])


@pytest.mark.parametrize("mark", [*MARKS.values(), 720_570_000])
def test_what_looks_like_a_mark_is_none(mark: int) -> None:
    assert marked(frame_of(sdk_body(0).replace(b'"top_k":-1', b'"top_k":%d' % mark))) is None
    require_same(sdk_body(0).replace(b'"gwss-x"', b'"%d"' % mark))


# -- the same as the whole --------------------------------------------------------------------------------------------

PIECES: Final = st.sampled_from(
    [
        *(
            b'"tokens":[',
            b'"tokens": [',
            b"]",
            b"1,2",
            b"1, 2",
            b"01",
            b"1000000000",
            b"999999999",
            b"",
            b"-1",
            b"[",
            b"{",
        ),
        *(
            b'"seq_id":1',
            b'"seq_id": 1',
            b'"seq_id":01',
            b'"seq_id":999999999999999999',
            b'"seq_id":9223372036854775807',
        ),
        *(b'"seed":1', b'"seed":0', b'"max_tokens":0', b'"max_tokens":1', b'"max_tokens":2147483648', b'"x\\"seed":1'),
        *(
            b'"prompt_logprobs":true',
            b'"prompt_logprobs_last_n":1',
            b'"later":{"seed":1,"max_tokens":5}',
            b'"stop":["1"]',
        ),
        *(b'"later":{"tokens":[7]}', b'{"tokens":[3]}', b",", b"}", b"\\", b'"', b"\xff", b"\\u0073", b"720570000"),
    ]
)


@st.composite
def altered(draw: st.DrawFn) -> bytes:
    """The SDK's body, in either spelling, with some pieces put in or in place of what stands there."""
    body = sdk_body(draw(st.integers(0, 3)))
    if draw(st.booleans()):
        body = spaced(body)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(body)))
        ends = [found for mark in b',]}"' if (found := body.find(mark, at)) >= 0]
        end = draw(st.sampled_from([at, *ends]))
        body = body[:at] + draw(PIECES) + body[end:]
    return body


@settings(deadline=None)
@given(altered())
def test_altered_bodies(body: bytes) -> None:
    require_same(body)


@settings(deadline=None)
@given(damaged(sdk_body(0), spaced(sdk_body(1))))
def test_damaged_bodies(body: bytes) -> None:
    require_same(body)


CHUNKS: Final = st.lists(st.lists(st.integers(-1, 2**31) | st.integers(0, 9), max_size=3), max_size=4)
NUMBERS: Final = st.none() | st.integers(-1, 3) | st.sampled_from([2**31 - 1, 2**31, 10**18, 2**63 - 1, 2**63])


@settings(deadline=None)
@given(
    chunks=CHUNKS,
    numbers=st.fixed_dictionaries({"max_tokens": NUMBERS, "seed": NUMBERS}),
    seq_id=NUMBERS,
    more=st.fixed_dictionaries(
        {},
        optional={
            "num_samples": st.integers(0, 2),
            "prompt_logprobs": st.booleans(),
            "prompt_logprobs_last_n": st.integers(0, 2),
            "later": st.sampled_from(["x", {"seed": 1}, {"tokens": [1]}]),
            "base_model": st.just("m"),
        },
    ),
    separators=st.sampled_from([(",", ":"), (", ", ": "), (",", ": ")]),
)
@example([[1], [2, 3]], {"max_tokens": 1, "seed": 2}, 3, {}, (",", ":"))
def test_any_request(
    chunks: list[list[int]],
    numbers: dict[str, int | None],
    seq_id: int | None,
    more: dict[str, Any],
    separators: tuple[str, str],
) -> None:
    document = {
        "prompt": {"chunks": [{"tokens": tokens} for tokens in chunks]},
        "sampling_params": {name: value for name, value in numbers.items() if value is not None},
        "sampling_session_id": "ss",
        "seq_id": seq_id,
        **more,
    }
    require_same(json.dumps(document, separators=separators).encode())


def test_a_frame_that_came_before_is_not_read_again() -> None:
    for index in range(2):
        decode_sample(sdk_body(index))
    with mock.patch.object(tinker_sample, "decode_whole", side_effect=AssertionError):
        assert [decode_sample(sdk_body(index)).seq_id for index in range(10)] == list(range(10))


def test_many_frames_are_not_kept() -> None:
    """A hostile client's, and each of them is read right."""
    for number in range(1000):
        body = sdk_body(0).replace(b'"temperature":1.0', b'"temperature":0.%d' % (number + 1))
        for _ in range(2):
            assert decode_sample(body).spec.params.temperature == float(f"0.{number + 1}")
    assert len(tinker_sample._frames) <= 512


def test_digests_are_those_of_older_versions() -> None:
    """A repeat may come to a worker of another version."""
    assert decode_sample(sdk_body(0)).spec.digest.hex() == "84173d20da132f7ad579bfdde12ef88c"
    assert (
        decode_whole(sdk_body(0).replace(b'"seed":', b'"stop":["\xc3\xa9"],"seed":')).spec.digest.hex()
        == "2562033216b7b149104aff8dc03d5e37"
    )
