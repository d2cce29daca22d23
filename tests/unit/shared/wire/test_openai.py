"""What is read of OpenAI's requests, and that the rest stays as it was written."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shared.core.errors import BadRequest
from shared.wire import openai


def call(**fields: Any) -> openai.OpenAiCall:
    return openai.decode_call(json.dumps({"model": "m"} | fields).encode())


def test_the_model_is_renamed_and_the_rest_is_left() -> None:
    body = (
        '{"seed": 12345678901234567890123, "model": "m", "temperature": 1.50, "messages": [{"content": "é"}]}'.encode()
    )
    renamed = openai.decode_call(body).encode('up"m')
    assert b"12345678901234567890123" in renamed and b"1.50" in renamed
    assert json.loads(renamed) == json.loads(body) | {"model": 'up"m'}


def test_a_field_that_is_given_twice_stands_once() -> None:
    """Nobody behind may read another model than was checked here."""
    renamed = openai.decode_call(b'{"model": "secret", "model": "m"}').encode("m")
    assert renamed.count(b"model") == 1 and b"secret" not in renamed


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"{}",
        b'{"model":""}',
        b'{"model":null}',
        b'{"model":["m"]}',
        b'{"model":"\xff"}',
        b'{"model":"m","x":NaN}',
        b'{"model":"m","n":1.5}',
        b'{"model":"m","max_tokens":"9"}',
        b'{"model":"m","x":' + b"[" * 100_000,
    ],
)
def test_a_request_that_is_none(body: bytes) -> None:
    """D2"""
    with pytest.raises(BadRequest):
        openai.decode_call(body)


@pytest.mark.parametrize(
    ("fields", "max_tokens"),
    [
        ({}, None),
        ({"max_tokens": 5}, 5),
        ({"max_tokens": None}, None),
        ({"max_completion_tokens": 7, "max_tokens": 5}, 7),
        ({"max_completion_tokens": None, "max_tokens": 5}, 5),
    ],
)
def test_how_long_it_may_be(fields: dict[str, Any], max_tokens: int | None) -> None:
    assert call(**fields).max_tokens == max_tokens


@pytest.mark.parametrize(
    ("fields", "sequences"),
    [
        ({}, 1),
        ({"n": 3}, 3),
        ({"n": None}, 1),
        ({"n": 2, "best_of": 5}, 5),
        ({"prompt": "text"}, 1),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": []}, 1),
        ({"prompt": ["a", "b", "c"]}, 3),
        ({"prompt": [[1, 2], [3]], "n": 2}, 4),
    ],
)
def test_how_many_sequences(fields: dict[str, Any], sequences: int) -> None:
    assert call(**fields).sequences == sequences


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (413, "invalid_request_error"),
        (429, "rate_limit_error"),
        (503, "server_error"),
    ],
)
def test_errors(status: int, kind: str) -> None:
    error = json.loads(openai.error_body("words", status))["error"]
    assert error == {"message": "words", "type": kind, "param": None, "code": status}


def test_models() -> None:
    listed = json.loads(openai.models({"a": 64, "b": None}))
    assert listed["object"] == "list"
    assert [card.get("max_model_len") for card in listed["data"]] == [64, None]
