"""Samples are a pure function of the run's seed and their index."""

from __future__ import annotations

import numpy as np
import pytest

from gateway.bench.load.workload import (
    MAX_ABANDONED_POLLS,
    PROMPT_TOKEN_MAX,
    PROMPT_TOKEN_MIN,
    Workload,
    abandon_after_s,
    sample,
)

WORKLOAD = Workload(seed=7, model="m", prompt_tokens=32, trouble_within_s=2.0)
MANY = 5_000


def test_the_same_sample_whenever_it_is_asked_for() -> None:
    first, again = sample(WORKLOAD, 11), sample(WORKLOAD, 11)
    assert first.prompt.tolist() == again.prompt.tolist()
    assert (first.seed, first.cancel_after_s, first.duplicate) == (again.seed, again.cancel_after_s, again.duplicate)


def test_no_two_samples_share_a_prompt() -> None:
    assert len({sample(WORKLOAD, index).prompt.tobytes() for index in range(MANY)}) == MANY


def test_another_seed_is_another_run() -> None:
    other = Workload(seed=8, model="m", prompt_tokens=32)
    assert sample(WORKLOAD, 0).prompt.tolist() != sample(other, 0).prompt.tolist()


@pytest.mark.parametrize("length", [1, 2, 32_768])
def test_prompts_have_their_length_and_stay_within_any_vocabulary(length: int) -> None:
    prompt = sample(Workload(seed=7, model="m", prompt_tokens=length), 3).prompt
    assert (prompt.dtype, prompt.shape) == (np.dtype(np.int32), (length,))
    assert prompt.min() >= PROMPT_TOKEN_MIN
    assert prompt.max() < PROMPT_TOKEN_MAX


def test_seeds_fit_every_upstream() -> None:
    assert all(0 <= sample(WORKLOAD, index).seed < 2**31 for index in range(MANY))


def test_fractions_are_kept_to() -> None:
    workload = Workload(seed=7, model="m", prompt_tokens=1, cancel=0.25, duplicates=0.5, trouble_within_s=2.0)
    samples = [sample(workload, index) for index in range(MANY)]
    cancels = [one.cancel_after_s for one in samples if one.cancel_after_s is not None]
    assert 0.22 < len(cancels) / MANY < 0.28
    assert 0.0 <= min(cancels) <= max(cancels) < 2.0
    assert 0.22 < sum(one.duplicate.at_once for one in samples) / MANY < 0.28
    assert 0.22 < sum(one.duplicate.reply_lost for one in samples) / MANY < 0.28
    assert not any(one.duplicate.at_once and one.duplicate.reply_lost for one in samples)


def test_nothing_is_troubled_unless_told() -> None:
    samples = [sample(WORKLOAD, index) for index in range(MANY)]
    assert all(one.cancel_after_s is None for one in samples)
    assert not any(one.duplicate.at_once or one.duplicate.reply_lost for one in samples)
    assert all(abandon_after_s(WORKLOAD, index, 0, 0) is None for index in range(100))


def test_polls_are_abandoned_each_by_its_own_draw_and_not_for_ever() -> None:
    workload = Workload(seed=7, model="m", abandon_polls=0.5)
    drawn = [[abandon_after_s(workload, index, poll, 0) is not None for poll in range(4)] for index in range(1_000)]
    assert len({tuple(polls) for polls in drawn}) == 16
    assert all((abandon_after_s(workload, index, 0, 0, 0.005) or 0) < 0.005 for index in range(1_000))
    always = Workload(seed=7, model="m", abandon_polls=1.0)
    assert abandon_after_s(always, 0, 9, MAX_ABANDONED_POLLS - 1) is not None
    assert abandon_after_s(always, 0, 9, MAX_ABANDONED_POLLS) is None
