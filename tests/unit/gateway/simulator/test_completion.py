"""Generations: the tokens of each choice, and where and why it ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gateway.simulator.ask import Ask
from gateway.simulator.completion import Choice, generate
from gateway.simulator.tokens import ASKS_TO_END, EOS, GREEDY_SEED, end_position, sampled, text_of

PROMPT = np.array([10, 11, 12], np.int32)
ASK = Ask("m", PROMPT, max_tokens=12, seed=7)
DRAWN = sampled("m", PROMPT, 7, 12)[0].tolist()


def only(**changes: Any) -> Choice:
    (choice,) = generate(replace(ASK, **changes), 0)
    return choice


def test_choices_are_drawn_with_seeds_in_a_row() -> None:
    """D5: n = 4 with a seed gives four different sequences, each that of seed + i."""
    choices = generate(replace(ASK, n=4), 0)
    assert len({choice.tokens.tobytes() for choice in choices}) == 4
    for index, choice in enumerate(choices):
        (alone,) = generate(replace(ASK, seed=7 + index), 0)
        assert np.array_equal(choice.tokens, alone.tokens)
        assert np.array_equal(choice.logprobs, alone.logprobs)
        assert np.array_equal(choice.tokens, sampled("m", PROMPT, 7 + index, 12)[0])


def test_without_a_seed_the_fresh_one_is_taken() -> None:
    first, second = (generate(replace(ASK, seed=None), fresh)[0] for fresh in (1, 2))
    assert (first.seed, second.seed) == (1, 2)
    assert not np.array_equal(first.tokens, second.tokens)


def test_greedy_is_the_same_with_any_seed() -> None:
    assert np.array_equal(only(temperature=0.0).tokens, sampled("m", PROMPT, GREEDY_SEED, 12)[0])
    assert np.array_equal(only(temperature=0.0, seed=1).tokens, only(temperature=0.0, seed=2).tokens)


def test_the_temperature_scales_logprobs_unless_they_are_raw() -> None:
    """D15"""
    (warm,), (cool,) = generate(ASK, 0), generate(replace(ASK, temperature=0.5), 0)
    assert np.array_equal(warm.tokens, cool.tokens)
    assert np.array_equal(cool.logprobs, 2 * warm.logprobs)
    (raw,) = generate(replace(ASK, temperature=0.5), 0, raw_logprobs=True)
    assert np.array_equal(raw.logprobs, warm.logprobs)


def test_length_is_the_end_when_nothing_stops_it() -> None:
    choice = only()
    assert choice.tokens.tolist() == DRAWN
    assert (choice.finish_reason, choice.stop_reason) == ("length", None)


def test_a_stop_token_is_kept_and_named() -> None:
    choice = only(stop_token_ids=frozenset({DRAWN[3], DRAWN[6]}))
    assert choice.tokens.tolist() == DRAWN[:4]
    assert len(choice.logprobs) == 4
    assert (choice.finish_reason, choice.stop_reason) == ("stop", DRAWN[3])


def test_a_stop_on_the_last_token_is_a_stop() -> None:
    choice = only(stop_token_ids=frozenset({DRAWN[-1]}))
    assert (len(choice.tokens), choice.finish_reason) == (12, "stop")


@pytest.mark.parametrize(
    ("stop", "kept"),
    [
        (text_of(DRAWN[0]), 1),
        (text_of(DRAWN[2]), 3),
        (text_of(DRAWN[2])[-2:] + text_of(DRAWN[3])[:2], 4),
        (text_of(DRAWN[-1]), 12),
    ],
)
def test_tokens_are_kept_up_to_the_one_that_completes_a_stop_string(stop: str, kept: int) -> None:
    choice = only(stop=(stop,))
    assert (len(choice.tokens), choice.finish_reason, choice.stop_reason) == (kept, "stop", stop)


def test_the_first_of_several_stops_counts() -> None:
    choice = only(stop=(text_of(DRAWN[5]), text_of(DRAWN[1])), stop_token_ids=frozenset({DRAWN[3]}))
    assert (len(choice.tokens), choice.stop_reason) == (2, text_of(DRAWN[1]))


def test_a_stop_string_that_does_not_occur_stops_nothing() -> None:
    assert only(stop=("never",)).finish_reason == "length"


def test_eos_is_kept_and_not_named_and_can_be_ignored() -> None:
    prompt = np.array([10, ASKS_TO_END], np.int32)
    at = end_position("m", prompt)
    assert at is not None
    choice = only(prompt=prompt, max_tokens=at + 5)
    assert (len(choice.tokens), choice.tokens[-1]) == (at + 1, EOS)
    assert (choice.finish_reason, choice.stop_reason) == ("stop", None)
    assert only(prompt=prompt, max_tokens=at + 5, ignore_eos=True).finish_reason == "length"
