"""A result is the sample's own to the last bit, or it is wrong."""

from __future__ import annotations

import numpy as np
import pytest

from gateway.bench.load.expected import first_difference, simulator_oracle
from gateway.bench.load.verification import ResultVerifier
from gateway.bench.load.workload import PROMPT_TOKEN_MIN, Sample, Workload, sample
from gateway.simulator.tokens import ASKS_TO_END, sampled
from shared.core.result import SampleResult, SequenceResult, StopReason
from shared.wire.sdk.result import encode_sample_response

WORKLOAD = Workload(seed=3, model="m", num_samples=2, max_tokens=5)
WANTED = sample(WORKLOAD, 0)


def oracle(wanted: Sample, choice: int) -> tuple[np.ndarray, np.ndarray]:
    tokens = (wanted.prompt[:5] + choice).astype(np.int32)
    return tokens, (tokens * np.float32(-0.001)).astype(np.float32)


def encoded(*pairs: tuple[np.ndarray, np.ndarray]) -> bytes:
    sequences = tuple(SequenceResult(t.tobytes(), p.tobytes(), StopReason.LENGTH) for t, p in pairs)
    return encode_sample_response(SampleResult(sequences))


def complaint(payload: bytes, *, foretold: bool = True) -> str | None:
    broken = ResultVerifier(WORKLOAD, oracle if foretold else None).complaint(payload, WANTED)
    assert broken is None or broken.wrong
    return None if broken is None else f"{broken.kind}: {broken.detail}"


def right() -> list[tuple[np.ndarray, np.ndarray]]:
    return [oracle(WANTED, 0), oracle(WANTED, 1)]


def test_its_own_result_is_right() -> None:
    assert complaint(encoded(*right())) is None


def test_the_two_sequences_exchanged_are_wrong() -> None:
    assert (complaint(encoded(*reversed(right()))) or "").startswith("wrong tokens: choice 0, position 0")


def test_another_samples_result_is_wrong() -> None:
    other = sample(WORKLOAD, 1)
    assert (complaint(encoded(oracle(other, 0), oracle(other, 1))) or "").startswith("wrong tokens")


def test_one_logprob_off_by_one_bit_is_wrong() -> None:
    pairs = right()
    pairs[1][1][3] = np.nextafter(pairs[1][1][3], np.float32(0))
    assert (complaint(encoded(*pairs)) or "").startswith("wrong logprobs: choice 1, position 3")


@pytest.mark.parametrize("foretold", [True, False])
def test_counts_and_lengths_are_checked_with_and_without_an_oracle(foretold: bool) -> None:
    first, second = right()
    assert complaint(encoded(first), foretold=foretold) == "wrong number of sequences: 2 expected, 1 received"
    short = (second[0], second[1][:4])
    assert complaint(encoded(first, short), foretold=foretold) == "wrong lengths: 20 bytes of tokens, 16 of logprobs"
    empty = (second[0][:0], second[1][:0])
    assert complaint(encoded(first, empty), foretold=foretold) == "wrong lengths: 0 bytes of tokens, 0 of logprobs"


def test_a_shorter_sequence_is_wrong_only_where_it_can_be_foretold() -> None:
    first, second = right()
    payload = encoded(first, (second[0][:4], second[1][:4]))
    assert complaint(payload) == "wrong tokens: choice 1: 4 values where 5 were expected"
    assert complaint(payload, foretold=False) is None


def test_the_simulators_answer_is_right_and_its_choices_are_told_apart() -> None:
    verifier = ResultVerifier(WORKLOAD, simulator_oracle(WORKLOAD))
    choices = [sampled(WORKLOAD.model, WANTED.prompt, WANTED.seed + choice, 5) for choice in (0, 1)]
    assert verifier.complaint(encoded(*choices), WANTED) is None
    swapped = verifier.complaint(encoded(*reversed(choices)), WANTED)
    assert swapped is not None and swapped.kind == "wrong tokens"
    other_model = [sampled("another", WANTED.prompt, WANTED.seed + choice, 5) for choice in (0, 1)]
    assert verifier.complaint(encoded(*other_model), WANTED) is not None


def test_no_prompt_asks_the_simulator_to_end_early() -> None:
    assert ASKS_TO_END < PROMPT_TOKEN_MIN


def test_something_that_is_no_protobuf_is_malformed() -> None:
    assert (complaint(b"\xff\xff\xff") or "").startswith("result malformed")


def test_the_first_difference_is_told_with_both_values() -> None:
    told = first_difference(np.array([1, 2, 9]), np.array([1, 2, 3]), 4)
    assert told == "choice 4, position 2: 9 where 3 was expected"
