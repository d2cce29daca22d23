"""Whose reply it is: by vLLM's own id, and behind a router that writes ids of its own, by the prompt."""

from __future__ import annotations

import json
from typing import Any, Final

import pytest
from msgspec.structs import replace

from shared.core.ids import request_id, sampling_session
from shared.core.model import Image, ModelRef, SampleSpec, SamplingParams
from shared.wire.vllm.ownership import ANOTHER_PROMPT, ANOTHER_REQUEST, why_not_ours
from tests.vllm_recordings import recording

SESSION: Final = sampling_session("gws-" + "A" * 32, b"1", ModelRef("sim/tiny"), b"s" * 32)
OURS: Final = request_id(SESSION, 7) + "-a1"
SPEC: Final = SampleSpec(b"10,11,12", 3, 1, SamplingParams())
PROMPT: Final = [10, 11, 12]


def completion(name: str, prompt: list[int] | None = PROMPT, tokens: int | None = 3, **more: Any) -> bytes:
    choices = [{"text": '"prompt_token_ids":[9],"prompt_tokens":9', "prompt_token_ids": prompt}]
    usage = {"prompt_tokens": tokens} if tokens is not None else None
    return json.dumps({**more, "id": name, "choices": choices, "usage": usage}, separators=(",", ":")).encode()


def generation(name: str, tokens: int) -> bytes:
    reply = {"request_id": name, "usage": {"prompt_tokens": tokens}, "choices": [{"token_ids": [5]}]}
    return json.dumps(reply, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (completion(f"cmpl-{OURS}"), None),
        # vLLM's id proves it: nothing else is looked at.
        (completion(f"cmpl-{OURS}", [9]), None),
        (generation(f"generate-tokens-{OURS}", 9), None),
        (completion(OURS), None),
        (completion(f"cmpl-{OURS}", model="m"), None),
        # Other requests of ours: another sample, another attempt, the scores of the same sample.
        (completion(f"cmpl-{request_id(SESSION, 8)}-a1"), ANOTHER_REQUEST),
        (completion(f"cmpl-{request_id(SESSION, 7)}-a2"), ANOTHER_REQUEST),
        (completion(f"cmpl-{request_id(SESSION, 7)}-scores-a1"), ANOTHER_REQUEST),
        (completion(f"cmpl-{request_id(SESSION, 8)}-a1", model="m"), ANOTHER_REQUEST),
        (completion(request_id(SESSION, 70) + "-a1"), ANOTHER_REQUEST),
        (generation(f"generate-tokens-{request_id(SESSION, 8)}-a1", 3), ANOTHER_REQUEST),
        # A router's own ids.
        (completion("cmpl-0123456789abcdef"), None),
        (completion("router-1", [10, 11, 13]), ANOTHER_PROMPT),
        (completion("router-1", [10, 11]), ANOTHER_PROMPT),
        (completion("router-1", [10, 11, 12, 13]), ANOTHER_PROMPT),
        (completion("router-1", []), ANOTHER_PROMPT),
        (completion("router-1", None, 4), ANOTHER_PROMPT),
        (completion("router-1", None, None), None),
        (generation("router-1", 4), ANOTHER_PROMPT),
        (generation("router-1", 3), None),
        (json.dumps({"id": "router-1", "prompt_token_ids": PROMPT}, indent=1).encode(), None),
        (json.dumps({"id": "router-1", "prompt_token_ids": [10, 11, 13]}, indent=1).encode(), ANOTHER_PROMPT),
        # What is no completion is for the decoders to refuse, in words of their own.
        (b"", None),
        (b"<html>", None),
        (b'{"error": {"message": "no"}}', None),
    ],
)
def test_whose_reply_it_is(body: bytes, why: str | None) -> None:
    assert why_not_ours(body, OURS, SPEC) == why
    assert why_not_ours(bytearray(body), OURS, SPEC) == why


def test_the_prompt_of_images_is_not_compared() -> None:
    """vLLM puts an image's tokens in the place of its one."""
    spec = replace(SPEC, images=(Image("png", b"iVBORw=="),))
    assert why_not_ours(completion("router-1", [10, 9, 9, 9]), OURS, spec) is None
    assert why_not_ours(completion(f"cmpl-{request_id(SESSION, 8)}-a1"), OURS, spec) == ANOTHER_REQUEST


def test_a_recorded_reply_names_its_request() -> None:
    body = recording("23_xreqid").body
    spec = SampleSpec(b"10,11,12,13,14,15,16,17", 8, 1, SamplingParams())
    assert why_not_ours(body, "gw-123", spec) is None
    assert why_not_ours(body, OURS, spec) is None
    assert why_not_ours(body, OURS, SPEC) == ANOTHER_PROMPT
