from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.core.errors import BadRequest
from shared.core.model import Category, Failure
from shared.wire.sdk import calls
from tests.fuzz.damage import damaged

if TYPE_CHECKING:
    from collections.abc import Callable

FULL: dict[str, tuple[Callable[[bytes], Any], dict[str, Any]]] = {
    "create_session": (
        partial(calls.decode_body, calls.CreateSession),
        {"tags": [], "user_metadata": {"a": 1}, "sdk_version": "0.38.0", "type": "create_session"},
    ),
    "heartbeat": (partial(calls.decode_body, calls.Heartbeat), {"session_id": "s", "type": "session_heartbeat"}),
    "finish": (calls.decode_finish, {"reason": {"type": "success"}, "detail": None}),
    "create_sampling_session": (
        calls.decode_create_sampling_session,
        {"session_id": "s", "sampling_session_seq_id": 0, "base_model": "m", "type": "create_sampling_session"},
    ),
    "join": (partial(calls.decode_body, calls.Join), {"sampling_session_id": "ss", "type": "join_sampling_session"}),
    "retrieve_future": (calls.decode_retrieve_future, {"request_id": "r", "allow_metadata_only": True}),
    "retrieve_futures": (
        calls.decode_retrieve_futures,
        {
            "target": {"type": "sampling_session", "sampling_session_id": "ss", "cloned_sampler_id": 3},
            "prev_cursor": 5,
            "timeout": 0.0,
            "retrieved_request_ids": ["r"],
        },
    ),
    "cancel_future": (calls.decode_cancel_future, {"request_id": "r"}),
    "client_config": (calls.decode_client_config, {"sdk_version": "0.38.0"}),
}


def encoded(document: Any) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


def decoded(name: str, **changes: Any) -> Any:
    decode, document = FULL[name]
    return decode(encoded(document | changes))


@pytest.mark.parametrize("name", FULL)
def test_cut_at_every_byte(name: str) -> None:
    decode, document = FULL[name]
    body = encoded(document)
    decode(body)
    for cut in range(1, len(body)):
        with pytest.raises(BadRequest):
            decode(body[:cut])


@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("body", [b"\xff", b"{", b"[" * 100_000, b'{"x":NaN}', b'{"a":1,"a":2}', b'{"a":"\\ud800"}'])
def test_hostile_bodies(name: str, body: bytes) -> None:
    """A13, D2"""
    with pytest.raises(BadRequest) as caught:
        FULL[name][0](body)
    assert str(caught.value)


@given(name=st.sampled_from(sorted(FULL)), data=st.data())
def test_any_value_in_any_field_is_read_or_refused(name: str, data: st.DataObject) -> None:
    """A13"""
    decode, document = FULL[name]
    field = data.draw(st.sampled_from(sorted(document)))
    value: Any = data.draw(
        st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.integers()) | st.just({})
    )
    try:
        decode(encoded(document | {field: value}))
    except BadRequest as error:
        assert str(error)


def test_sessions() -> None:
    assert decoded("create_session").sdk_version == "0.38.0"
    assert decoded("heartbeat").session_id == "s"
    assert decoded("join").sampling_session_id == "ss"
    calls.decode_finish(b"")


def test_sampling_session_by_base_model_or_path() -> None:
    call = decoded("create_sampling_session")
    assert (call.session_id, call.sampling_session_seq_id, call.base_model, call.model_path) == ("s", 0, "m", None)
    path = "tinker://run/sampler_weights/1"
    assert decoded("create_sampling_session", base_model=None, model_path=path).model_path == path


@pytest.mark.parametrize(
    "changes",
    [
        {"base_model": None},
        {"model_path": "tinker://x"},
        {"base_model": ""},
        {"base_model": "x" * 401},
        {"base_model": "é" * 201},
        {"sampling_session_seq_id": -1},
        {"sampling_session_seq_id": 2**63},
        {"sampling_session_seq_id": 1.0},
        {"session_id": 5},
    ],
)
def test_sampling_session_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        decoded("create_sampling_session", **changes)


def test_longest_model_name() -> None:
    assert decoded("create_sampling_session", base_model="é" * 200).base_model == "é" * 200


@pytest.mark.parametrize("request_id", [None, 5, 100000000000000000000, ["r"], {"a": 1}, 1.5, True, ""])
def test_an_id_that_is_no_text_is_an_id_like_any_other(request_id: Any) -> None:
    """A7, A19: a plain 404 later, not a 400 and never an error."""
    assert decoded("retrieve_future", request_id=request_id).request_id == ""
    assert decoded("cancel_future", request_id=request_id).request_id == ""


@pytest.mark.parametrize("request_id", ["abc", "x" * 10_000, "é", "a:1"])
def test_any_text_is_an_id(request_id: str) -> None:
    """A7"""
    assert decoded("retrieve_future", request_id=request_id).request_id == request_id


def require_same_retrieve(body: bytes) -> None:
    found: list[Any] = []
    for decode in (calls.decode_retrieve_future, calls.decode_any_retrieve_future):
        try:
            found.append(decode(body))
        except BadRequest as error:
            found.append(str(error))
    assert found[0] == found[1]


@settings(deadline=None)
@given(
    damaged(
        b'{"request_id":"gwss-a.gws-b.bc:1","allow_metadata_only":true}',
        b'{"request_id": "s:1", "allow_metadata_only": false}',
        b'{"request_id":"r"}',
    )
)
def test_retrieves_are_read_alike_in_both_ways(body: bytes) -> None:
    require_same_retrieve(body)


ODD_RETRIEVES = r"""
{} [] {"request_id":1} {"request_id":null} {"request_id":"\ud800"} {"request_id":"\u0000"} {"request_id":"r"}x
["r",true]
{"request_id":"r","request_id":"r"} {"request_id":"r","allow_metadata_only":null} {"\u0072equest_id":"r"}
{"request_id":"r","x":1} {"allow_metadata_only":true} {"request_id":"ÿ"} {"request_id":1,"request_id":2}
{"request_id":"r","allow_metadata_only":1} {"request_id":"\"","allow_metadata_only":true}
{"allow_metadata_only":true,"allow_metadata_only":true} {"request_id":"r","allow_metadata_only":true}
"""


@pytest.mark.parametrize("body", [b"", b'{"request_id":"\xff"}', b"{" * 3000, *ODD_RETRIEVES.encode().split()])
def test_odd_retrieves_are_read_alike_in_both_ways(body: bytes) -> None:
    require_same_retrieve(body)


def test_metadata_is_off_unless_asked_for() -> None:
    assert calls.decode_retrieve_future(b'{"request_id":"r"}').allow_metadata_only is False
    assert decoded("retrieve_future").allow_metadata_only is True


def test_retrieve_futures() -> None:
    call = decoded("retrieve_futures")
    assert (call.sampling_session_id, call.cloned_sampler_id, call.prev_cursor, call.timeout) == ("ss", 3, 5, 0.0)
    assert list(call.retrieved_request_ids) == ["r"]


def test_retrieve_futures_of_sdk_0_27() -> None:
    call = calls.decode_retrieve_futures(
        b'{"target":{"type":"sampling_session","sampling_session_id":"ss","cloned_sampler_id":0},"prev_cursor":0}'
    )
    assert call.timeout is None
    assert list(call.retrieved_request_ids) == []


@pytest.mark.parametrize(
    ("cursor", "read_as"), [(-1, 0), (2**53, 0), (2**64, 0), (10**30, 0), (2**53 - 1, 2**53 - 1), (None, 0)]
)
def test_a_cursor_that_we_never_gave_reads_as_the_start(cursor: int | None, read_as: int) -> None:
    assert decoded("retrieve_futures", prev_cursor=cursor).prev_cursor == read_as


@pytest.mark.parametrize("kind", ["training", "", 5])
def test_other_targets_are_refused(kind: Any) -> None:
    with pytest.raises(BadRequest):
        decoded("retrieve_futures", target={"type": kind, "sampling_session_id": "ss"})


@pytest.mark.parametrize("body", [b"", b"{}", b"null", b'{"sdk_version":5}', b'{"sdk_version":null,"x":1}', b"[1]"])
def test_client_config_asks_for_nothing(body: bytes) -> None:
    assert calls.decode_client_config(body) == ""


# -- replies ----------------------------------------------------------------------------------------------------------

USER_FAILURE = Failure('n "must" be', Category.USER)


@pytest.mark.parametrize(
    ("body", "golden"),
    [
        (calls.promise("ss:1", ["k:1:0", "k:1:1"]), b'{"request_id":"ss:1","sample_sequence_ids":["k:1:0","k:1:1"]}'),
        (
            calls.try_again("r", "active", None),
            b'{"type":"try_again","request_id":"r","queue_state":"active"}',
        ),
        (
            calls.try_again("r", "paused_capacity", "busy"),
            b'{"type":"try_again","request_id":"r","queue_state":"paused_capacity","queue_state_reason":"busy"}',
        ),
        (calls.failure_body(USER_FAILURE), b'{"error":"n \\"must\\" be","category":"user"}'),
        (calls.complete_metadata(70_000), b'{"status":"complete_metadata","response_payload_size":70000}'),
        (calls.completions((), 7), b'{"completions":[],"cursor":7}'),
        (
            calls.completions([("a", True, 178), ("b", False, 0)], 2**53 - 1),
            (
                b'{"completions":[{"state":"finished","request_id":"a","response_payload_uncompressed_size":178},'
                b'{"state":"failed","request_id":"b"}],"cursor":9007199254740991}'
            ),
        ),
        (calls.session("s"), b'{"session_id":"s","type":"create_session"}'),
        (calls.sampling_session("ss"), b'{"sampling_session_id":"ss","type":"create_sampling_session"}'),
        (calls.joined(5), b'{"client_counter":5,"type":"join_sampling_session"}'),
        (calls.sampler("ss", "m", None), b'{"sampler_id":"ss","base_model":"m"}'),
        (
            calls.sampler("ss", "m", "tinker://r/w/1"),
            b'{"sampler_id":"ss","base_model":"m","model_path":"tinker://r/w/1"}',
        ),
        (
            calls.capabilities({"m": 4096, "n": None}),
            (
                b'{"supported_models":[{"model_name":"m","trainable":false,"sampleable":true,"max_context_length":4096},'
                b'{"model_name":"n","trainable":false,"sampleable":true}]}'
            ),
        ),
        (calls.error_body("no"), b'{"detail":"no"}'),
    ],
)
def test_golden_replies(body: bytes, golden: bytes) -> None:
    """Never null where the SDK expects a value: its parser takes that for a wrong type."""
    assert body == golden


@pytest.mark.parametrize(
    ("version", "on"),
    [
        ("0.26.2", False),
        ("0.27.0", False),
        ("0.27.1", False),
        ("0.27.2", True),
        ("0.28", True),
        ("0.38.0", True),
        ("0.100.0", True),
        ("1.0", True),
        ("", False),
        ("latest", False),
        ("27", False),
        ("9" * 5000, False),
    ],
)
def test_session_poll_only_where_it_ends_and_rests(version: str, on: bool) -> None:
    """0.26.2 and 0.27.0 poll for ever, and repeat every error each second."""
    flags = json.loads(calls.client_config(version, session_poll=True))
    assert flags["sample_use_retrieve_futures"] is on
    assert flags["sample_join_sampling_session"] is True
    assert json.loads(calls.client_config(version, session_poll=False))["sample_use_retrieve_futures"] is False


def test_cancelling_is_offered_to_all() -> None:
    flags = json.loads(calls.DYNAMIC_CONFIG)
    assert flags["sample_cancel_enabled"] is True
    assert flags["refresh_interval_sec"] >= 10


@pytest.mark.parametrize(
    ("accept", "protobuf"),
    [
        (None, False),
        (b"", False),
        (b"*/*", False),
        (b"application/json", False),
        (b"application/x-protobuf, application/json", True),
        (b"application/x-protobuf", True),
    ],
)
def test_protobuf_where_it_is_asked_for(accept: bytes | None, protobuf: bool) -> None:
    assert calls.prefers_protobuf(accept) is protobuf
