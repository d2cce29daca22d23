from __future__ import annotations

import json
from contextlib import suppress
from typing import Any, Final

from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.bench.load import requests
from gateway.bench.load.workload import Workload, sample
from shared.core.errors import BadRequest
from shared.wire.sdk.prompt import MOST_LISTS
from shared.wire.sdk.sample import SampleCall, decode_sample, sample_steps
from shared.wire.strict_json import at_once
from tests.fuzz.damage import damaged

WORKLOAD: Final = Workload(seed=1, model="sim/tiny", prompt_tokens=4, max_tokens=64)


def sdk_body(index: int) -> bytes:
    return requests.asample_body(WORKLOAD, sample(WORKLOAD, index), "gwss-x", index)


def spaced(body: bytes) -> bytes:
    """As httpx before 0.28 writes it."""
    return json.dumps(json.loads(body)).encode()


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len({key for key, _ in pairs}) == len(pairs), "a key twice"
    return dict(pairs)


def require_what_it_says(body: bytes) -> None:
    """A body that is accepted says, to another reader of JSON, what was read of it, by either way to read a prompt."""
    for most_lists in (MOST_LISTS, 0):
        with suppress(BadRequest):
            require_said(body, at_once(sample_steps(body, most_lists)))


def require_said(body: bytes, call: SampleCall) -> None:
    document = json.loads(body, object_pairs_hook=once)
    params = document.get("sampling_params") or {}
    tokens = [token for chunk in document["prompt"]["chunks"] for token in chunk.get("tokens", ())]
    assert call.spec.prompt == ",".join(map(str, tokens)).encode()
    assert call.spec.prompt_tokens == len(tokens)
    assert (call.seq_id, call.spec.params.max_tokens) == (document.get("seq_id"), params.get("max_tokens"))
    assert call.spec.params.seed == params.get("seed")


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
    require_what_it_says(body)


@settings(deadline=None)
@given(damaged(sdk_body(0), spaced(sdk_body(1))))
def test_damaged_bodies(body: bytes) -> None:
    require_what_it_says(body)


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
    require_what_it_says(json.dumps(document, separators=separators).encode())


def test_digests_are_those_of_older_versions() -> None:
    """A repeat may come to a worker of another version."""
    assert decode_sample(sdk_body(0)).spec.digest.hex() == "84173d20da132f7ad579bfdde12ef88c"
    assert (
        decode_sample(sdk_body(0).replace(b'"seed":', b'"stop":["\xc3\xa9"],"seed":')).spec.digest.hex()
        == "2562033216b7b149104aff8dc03d5e37"
    )
