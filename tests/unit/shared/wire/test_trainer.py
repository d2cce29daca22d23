"""The few documents of a trainer that are read: what is in them, and what is not one of them."""

from __future__ import annotations

import json

import pytest

from shared.core.errors import BadRequest
from shared.wire import trainer

NONE_OF_THEM = [b"", b"{", b"[]", b"null", b'"x"', b"\xff", b"[" * 100_000, b"<html>"]


@pytest.mark.parametrize("body", [*NONE_OF_THEM, b"{}", b'{"model_id": 5}'])
def test_a_save_needs_its_model(body: bytes) -> None:
    with pytest.raises(BadRequest, match="save_weights_for_sampler"):
        trainer.decode_save_for_sampler(body)


def test_a_save() -> None:
    body = b'{"model_id":"s:train:0","seq_id":3,"sampling_session_seq_id":1,"type":"save_weights_for_sampler"}'
    assert trainer.decode_save_for_sampler(body).model_id == "s:train:0"


@pytest.mark.parametrize(
    "body", [*NONE_OF_THEM, b"{}", b'{"session_id":""}', b'{"session_id":"gws-x"}', b'{"session_id":7}']
)
def test_a_session_id_that_cannot_be_used(body: bytes) -> None:
    assert trainer.session_id_of(body) is None


def test_ids_in_replies() -> None:
    assert trainer.session_id_of(b'{"session_id":"s-1","info_message":"hi"}') == "s-1"
    assert trainer.promised_id(b'{"request_id":"17","model_id":"m"}') == "17"
    info = trainer.sampler_info(b'{"sampler_id":"x","base_model":"b","model_path":"tinker://r/w"}')
    assert info is not None and info.model_path == "tinker://r/w"
    assert trainer.base_model_of(b'{"base_model":"b","is_lora":true,"lora_rank":8}') == "b"


@pytest.mark.parametrize("body", NONE_OF_THEM)
def test_replies_that_are_something_else(body: bytes) -> None:
    assert trainer.promised_id(body) is None
    assert trainer.saved(body) is None
    assert trainer.sampler_info(body) is None
    assert trainer.base_model_of(body) is None


def test_results_of_a_save() -> None:
    by_path, born = trainer.saved(b'{"path":"tinker://r/w"}'), trainer.saved(b'{"path":null,"sampling_session_id":"x"}')
    assert by_path is not None and (by_path.path, by_path.sampling_session_id) == ("tinker://r/w", None)
    assert born is not None and (born.path, born.sampling_session_id) == (None, "x")


def test_one_value_is_replaced_and_the_others_stay_as_they_were_written() -> None:
    body = b'{"a": 12345678901234567890123, "request_id": "17", "b": [1.50, null, {"request_id": "17"}]}'
    replaced = trainer.replaced(body, "request_id", 'g"w')
    assert b"12345678901234567890123" in replaced and b"1.50" in replaced
    assert json.loads(replaced) == json.loads(body) | {"request_id": 'g"w'}
