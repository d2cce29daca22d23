"""What no client should send, to every route of a running gateway."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

import pytest

from tests.system.stack import Stack, running_stack
from workers.api.app import API, HOT, ROUTED

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

POSTED: Final = sorted(path for method, path, _ in (*HOT, *ROUTED) if method == "POST")
READ: Final = sorted(path for method, path, _ in (*HOT, *ROUTED) if method == "GET")
# The SDK holds up a user's error for 30 s when telemetry fails: it is taken unread. A client without its configuration
# cannot even start: what can be overlooked there is.
UNREAD: Final = {"/telemetry"}
SEED: Final = 20_816


def _bodies() -> dict[str, bytes]:
    noise = random.Random(SEED)
    return {
        "random bytes": noise.randbytes(2_000),
        "invalid UTF-8": b'{"session_id":"\xff\xfe","request_id":"\xc3\x28","sdk_version":"\xff"}',
        "cut JSON": b'{"request_id": "a',
        "an array": b"[1, 2, 3]",
        "a string": b'"abc"',
        "null": b"null",
        "deep nesting": b'{"a":' * 100_000,
        "deep array": b"[" * 100_000 + b"]" * 100_000,
        "NaN": b'{"seq_id": NaN, "prev_cursor": Infinity}',
        "huge number": b'{"seq_id": 1e400, "session_id": 18446744073709551616}',
        "wrong types": b'{"session_id": 1, "request_id": {}, "sampling_session_id": [], "target": 5, "sdk_version": 4}',
    }


BODIES: Final = _bodies()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("bad-input"), "--poll-timeout", "1") as stack:
        yield stack
        log = stack.gateway.process.log
        assert "Traceback" not in log, f"seed {SEED}"


def refused(stack: Stack, method: str, path: str, body: bytes, **headers: str) -> tuple[int, str]:
    connection = stack.gateway.connect()
    try:
        reply = connection.call(method, API + path, body, **headers)
    finally:
        connection.close()
    text = reply.body.decode()
    assert reply.headers["content-type"] == "application/json", text
    assert int(reply.headers["content-length"]) == len(reply.body) > 0
    assert "Traceback" not in text and "Error:" not in text, text
    detail = reply.json().get("detail", "")
    return reply.status, detail


def _filled(path: str) -> str:
    return path.replace("{session_id}", "abc").replace("{sampling_session_id}", "abc")


@pytest.mark.parametrize("what", BODIES)
@pytest.mark.parametrize("path", POSTED)
def test_a_body_that_makes_no_sense_is_a_client_error(stack: Stack, path: str, what: str) -> None:
    """A13, D2"""
    status, detail = refused(stack, "POST", _filled(path), BODIES[what])
    if path in UNREAD or (path.startswith("/client/") and status == 200):
        assert status == 200
        return
    assert 400 <= status < 500 and status != 429, detail
    assert detail


@pytest.mark.parametrize("path", POSTED)
@pytest.mark.parametrize(
    "headers",
    [
        {"Content_Type": "text/plain"},
        {"Content_Type": "multipart/form-data; boundary=x"},
        {"Content_Type": "application/x-protobuf"},
        {"Content_Encoding": "gzip"},
        {"Content_Encoding": "snappy"},
    ],
    ids=lambda headers: next(iter(headers.values())),
)
def test_a_wrong_content_type_or_encoding_is_a_client_error(stack: Stack, path: str, headers: dict[str, str]) -> None:
    """A13"""
    status, _ = refused(stack, "POST", _filled(path), b"\x1f\x8b\x08 no such thing", **headers)
    assert status == 200 if path in UNREAD and status < 400 else 400 <= status < 500 and status != 429


@pytest.mark.parametrize("path", READ)
def test_a_path_of_nonsense_is_a_404(stack: Stack, path: str) -> None:
    """A13"""
    if "{" in path:
        status, detail = refused(stack, "GET", path.replace("{sampling_session_id}", "%ff%00%0d%0a"), b"")
        assert (status, bool(detail)) == (404, True)


@pytest.mark.parametrize("path", [*POSTED, *READ])
def test_a_wrong_method_is_told_as_json(stack: Stack, path: str) -> None:
    """A13"""
    status, detail = refused(stack, "DELETE", _filled(path), b"")
    assert status in (404, 405, 501), detail
    assert detail
