"""Spoiled replies."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from gateway.simulator import generate_api
from gateway.simulator.ask import Ask
from gateway.simulator.completion import generate
from gateway.simulator.faults import ScriptedFault
from gateway.simulator.http import HttpReply, head_of
from gateway.simulator.misbehaviour import spoil
from gateway.simulator.render import completion

PLAIN = Ask("tiny", np.array([1, 2], np.int32), 4, n=2, seed=1)
FULL = Ask("tiny", np.array([1, 2], np.int32), 4, n=2, seed=1, logprobs=0, return_token_ids=True)


def reply_to(ask: Ask = FULL) -> HttpReply:
    return HttpReply(body=completion(ask, generate(ask, 0), "x", 1))


def spoiled(kind: str, ask: Ask = FULL, **options: Any) -> Any:
    return json.loads(spoil(reply_to(ask), ScriptedFault(kind, options)).body)


@pytest.mark.parametrize("fault", [None, ScriptedFault("hang"), ScriptedFault("delay")], ids=repr)
def test_other_faults_leave_the_reply_alone(fault: ScriptedFault | None) -> None:
    assert spoil(reply_to(), fault) == reply_to()


@pytest.mark.parametrize("kept", [0, 3])
def test_abort_keeps_some_tokens_consistently(kept: int) -> None:
    """D9, D16, D17"""
    document = spoiled("abort", tokens=kept)
    for choice in document["choices"]:
        assert choice["finish_reason"] == "abort"
        assert {len(values) for values in choice["logprobs"].values()} == {kept} == {len(choice["token_ids"])}
    assert document["usage"]["completion_tokens"] == 2 * kept


def test_abort_without_token_ids_leaves_them_out() -> None:
    assert spoiled("abort", PLAIN)["choices"][0]["token_ids"] is None


def test_null_logprobs_are_null() -> None:
    """D3"""
    assert None in spoiled("null_logprobs")["choices"][0]["logprobs"]["token_logprobs"]


def test_nan_is_no_json() -> None:
    """D10, D2"""
    with pytest.raises(ValueError, match="NaN"):
        json.loads(spoil(reply_to(), ScriptedFault("nan")).body, parse_constant=_refuse)


def _refuse(name: str) -> None:
    raise ValueError(name)


def test_choices_are_missing() -> None:
    """D4, D14"""
    assert len(spoiled("missing_choices")["choices"]) == 1


def test_lengths_differ() -> None:
    """D4"""
    choice = spoiled("wrong_lengths")["choices"][0]
    assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"]) - 1


@pytest.mark.parametrize("value", [2**40, -1, 1.5])
def test_a_token_is_bad(value: float) -> None:
    """D13"""
    assert spoiled("bad_token", value=value)["choices"][0]["token_ids"][0] == value


@pytest.mark.parametrize("kind", ["null_logprobs", "wrong_lengths", "bad_token"])
def test_what_was_not_asked_for_cannot_be_spoiled(kind: str) -> None:
    assert spoiled(kind, PLAIN) == json.loads(reply_to(PLAIN).body)


def test_html_empty_and_error_come_with_status_200() -> None:
    """D3, D14"""
    html, empty, error = (spoil(reply_to(), ScriptedFault(kind)) for kind in ("html", "empty", "error_in_200"))
    assert {html.status, empty.status, error.status} == {200}
    assert html.body.startswith(b"<html>") and html.content_type == "text/html"
    assert empty.body == b""
    assert set(json.loads(error.body)) == {"error"}


def test_replies_are_cut_after_the_head_or_in_the_body() -> None:
    head = len(head_of(reply_to(), keep_alive=True))
    assert spoil(reply_to(), ScriptedFault("reset_after_headers")).cut_at == head
    cut_at = spoil(reply_to(), ScriptedFault("reset_in_body")).cut_at
    assert cut_at is not None
    assert head < cut_at < head + len(reply_to().body)


# -- generations ------------------------------------------------------------------------------------------------------


def spoiled_generation(kind: str, ask: Ask = FULL, **options: Any) -> Any:
    body = generate_api.render(ask, generate(ask, 0), "x", 1)
    return json.loads(spoil(HttpReply(body=body), ScriptedFault(kind, options)).body)


@pytest.mark.parametrize("kept", [0, 3])
def test_an_aborted_generation_keeps_some_tokens(kept: int) -> None:
    """D9, D16, D17"""
    for choice in spoiled_generation("abort", tokens=kept)["choices"]:
        assert choice["finish_reason"] == "abort"
        assert len(choice["logprobs"]["content"]) == kept == len(choice["token_ids"])


def test_a_generation_is_spoiled_in_the_same_ways() -> None:
    """D3, D4, D10, D13"""
    assert spoiled_generation("null_logprobs")["choices"][0]["logprobs"]["content"][-1]["logprob"] is None
    assert len(spoiled_generation("wrong_lengths")["choices"][0]["logprobs"]["content"]) == 3
    assert len(spoiled_generation("missing_choices")["choices"]) == 1
    assert spoiled_generation("bad_token", value=-1)["choices"][0]["token_ids"][0] == -1
    told = [
        place["logprob"] for choice in spoiled_generation("nan")["choices"] for place in choice["logprobs"]["content"]
    ]
    assert set(told) == {-9999.0}


def test_weights_change_in_the_middle_of_a_generation() -> None:
    for choice in spoiled_generation("weights_changed", versions=["a", "b"])["choices"]:
        assert choice["weight_versions"] == [
            {"version": "a", "start": 0, "end": 2},
            {"version": "b", "start": 2, "end": 4},
        ]
    assert spoiled("weights_changed") == json.loads(reply_to().body)
