"""The meaning of a reply to the SDK, once its status has been accepted."""

from __future__ import annotations

import pytest

from gateway.bench.load.reactions import ReplyEvent
from gateway.bench.load.replies import (
    Again,
    Completion,
    Completions,
    Payload,
    Promise,
    SampleFailure,
    detail_of,
    event_of,
    read_completions,
    read_flag,
    read_promise,
    read_result,
    read_text,
)
from gateway.bench.load.transport import GatewayReply


def reply(
    body: bytes, content_type: str = "application/json", status: int = 200, has_length: bool = True
) -> GatewayReply:
    return GatewayReply(status, content_type, body, has_length)


def test_events() -> None:
    assert event_of(None) == ReplyEvent(0)
    assert event_of(reply(b"{}", status=408)) == ReplyEvent(408, pending=True)
    assert event_of(reply(b"", status=408)) == ReplyEvent(408)
    assert event_of(reply(b"x", status=400)) == ReplyEvent(400)
    assert event_of(reply(b"x", status=400, has_length=False)) == ReplyEvent(400, bare=True)
    assert event_of(reply(b"x", status=500, has_length=False)) == ReplyEvent(500)


def test_a_promise_needs_its_id_and_one_label_per_sequence() -> None:
    """A8."""
    good = reply(b'{"request_id":"r","sample_sequence_ids":["a","b"]}')
    assert read_promise(good, 2) == Promise("r", ("a", "b"))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"<html>",
        b'{"request_id":"r"}',
        b'{"request_id":7,"sample_sequence_ids":["a","b"]}',
        b'{"request_id":"r","sample_sequence_ids":["a"]}',
        b'{"request_id":"r","sample_sequence_ids":["a","a"]}',
    ],
)
def test_any_other_promise_is_wrong(body: bytes) -> None:
    """A8."""
    broken = read_promise(reply(body), 2)
    assert isinstance(broken, SampleFailure)
    assert broken.wrong


def test_protobuf_is_the_result_whatever_is_in_it() -> None:
    assert read_result(reply(b'{"error":1}', "application/x-protobuf"), True) == Payload(b'{"error":1}')


def test_try_again_keeps_what_was_asked_for() -> None:
    body = reply(b'{"type":"try_again","request_id":"r","queue_state":"active"}')
    assert read_result(body, True) == Again(True)
    assert read_result(body, False) == Again(False)


def test_metadata_is_legal_once() -> None:
    body = reply(b'{"status":"complete_metadata","response_payload_size":9}')
    assert read_result(body, True) == Again(False)
    assert isinstance(read_result(body, False), SampleFailure)


def test_an_error_body_is_delivered_and_a_malformed_one_is_wrong() -> None:
    error = read_result(reply(b'{"error":"bad weights","category":"server"}'), True)
    assert error == SampleFailure("error, category server", "bad weights", wrong=False, acknowledged=True)
    for body in (b"", b"<html>", b'{"type":"sample"}', b"[]"):
        broken = read_result(reply(body), True)
        assert isinstance(broken, SampleFailure)
        assert broken.wrong and not broken.acknowledged


def test_completions() -> None:
    body = reply(
        b'{"completions":[{"state":"finished","request_id":"a","response_payload_uncompressed_size":178},'
        b'{"state":"finished","request_id":"b","response_payload_uncompressed_size":null},'
        b'{"state":"failed","request_id":"c"}],"cursor":4294967299}'
    )
    entries = (Completion("a", True, 178), Completion("b", True, 0), Completion("c", False, 0))
    assert read_completions(body) == Completions(entries, 4_294_967_299)
    assert read_completions(reply(b'{"completions":[],"cursor":0}')) == Completions((), 0)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b'{"completions":[]}',
        b'{"cursor":1}',
        b'{"completions":[],"cursor":"1"}',
        b'{"completions":[{"state":"cancelled","request_id":"a"}],"cursor":1}',
        b'{"completions":[{"state":"finished"}],"cursor":1}',
        b'{"completions":[7],"cursor":1}',
    ],
)
def test_any_other_session_poll_is_wrong(body: bytes) -> None:
    assert isinstance(read_completions(reply(body)), SampleFailure)


def test_single_fields() -> None:
    assert read_text(reply(b'{"session_id":"s"}'), "session_id") == "s"
    assert read_text(reply(b'{"session_id":7}'), "session_id") is None
    assert read_text(reply(b"nonsense"), "session_id") is None
    assert read_flag(reply(b'{"f":true}'), "f")
    assert not read_flag(reply(b'{"f":1}'), "f")


def test_details_are_short_and_printable() -> None:
    assert detail_of(None) == "no reply"
    assert len(detail_of(reply(b"x" * 10_000))) == 300
    assert detail_of(reply(b"\xff")) == "\N{REPLACEMENT CHARACTER}"
