from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.core.logprobs_check import logprobs_scale

LOGITS = {10: 2.0, 11: 1.0, 12: -0.5, 13: -3.0}


def processed(logits: dict[int, float], temperature: float) -> dict[int, float]:
    norm = math.log(sum(math.exp(z / temperature) for z in logits.values()))
    return {token: z / temperature - norm for token, z in logits.items()}


def only(logprobs: dict[int, float], *tokens: int) -> dict[int, float]:
    return {token: logprobs[token] for token in tokens}


def test_processed_and_raw() -> None:
    """D15"""
    at_one = processed(LOGITS, 1.0)
    assert logprobs_scale(at_one, processed(LOGITS, 0.5)) is True
    assert logprobs_scale(at_one, at_one) is False


def test_two_common_tokens_are_enough_whatever_was_sampled() -> None:
    at_one, at_half = processed(LOGITS, 1.0), processed(LOGITS, 0.5)
    assert logprobs_scale(only(at_one, 10, 12, 13), only(at_half, 10, 11, 12)) is True
    assert logprobs_scale(only(at_one, 10, 12), only(at_one, 10, 12, 13)) is False


@pytest.mark.parametrize(
    ("at_one", "at_half"),
    [
        ({}, {}),
        ({1: -0.1}, {2: -0.1}),
        ({1: -0.5}, {1: -0.1}),
        ({1: -1.0, 2: -1.05}, {1: -1.0, 2: -1.1}),
        ({1: -1.0, 2: -9999.0}, {1: -1.0, 2: -9999.0}),
    ],
    ids=["nothing", "nothing in common", "one token", "too alike", "clamped"],
)
def test_what_does_not_tell(at_one: dict[int, float], at_half: dict[int, float]) -> None:
    assert logprobs_scale(at_one, at_half) is None


@given(
    st.dictionaries(st.integers(0, 100), st.floats(-20, 20), min_size=2, max_size=8),
    st.lists(st.floats(-0.01, 0.01), min_size=8, max_size=8),
)
def test_noise_of_batching_never_turns_the_answer(logits: dict[int, float], noise: list[float]) -> None:
    def shaken(logprobs: dict[int, float]) -> dict[int, float]:
        return {token: value + e for (token, value), e in zip(logprobs.items(), noise, strict=False)}

    at_one = processed(logits, 1.0)
    assert logprobs_scale(at_one, shaken(processed(logits, 0.5))) is not False
    assert logprobs_scale(at_one, shaken(at_one)) is not True
