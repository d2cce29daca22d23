"""Compute the expected result of a sample, and how a result differs from it. Pure.

This module needs only the standard library and numpy, since it also runs under the interpreter of an SDK.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gateway.simulator.tokens import sampled

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from gateway.bench.load.workload import Sample, Workload

    # (sample, choice) -> tokens int32[T], logprobs float32[T]
    Oracle = Callable[[Sample, int], tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]]


class Difference(NamedTuple):
    """A difference from the expected result. `kind` is one of a few fixed texts, `detail` is for a person."""

    kind: str
    detail: str


def simulator_oracle(workload: Workload) -> Oracle:
    """Return the function that computes the simulated vLLM's answer; choice i is drawn with seed + i, as in vLLM."""

    def oracle(wanted: Sample, choice: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        return sampled(workload.model, wanted.prompt, wanted.seed + choice, workload.max_tokens)

    return oracle


def difference(
    tokens: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32], wanted: Sample, choice: int, oracle: Oracle
) -> Difference | None:
    """Compare one sequence bit by bit, `tokens` int32[T] and `logprobs` float32[T]; return None if it is right."""
    expected_tokens, expected_logprobs = oracle(wanted, choice)
    if tokens.tobytes() != expected_tokens.tobytes():
        return Difference("wrong tokens", first_difference(tokens, expected_tokens, choice))
    if logprobs.tobytes() != expected_logprobs.tobytes():
        return Difference("wrong logprobs", first_difference(logprobs, expected_logprobs, choice))
    return None


def first_difference(got: npt.NDArray[np.generic], expected: npt.NDArray[np.generic], choice: int) -> str:
    """Describe where two arrays first differ."""
    if len(got) != len(expected):
        return f"choice {choice}: {len(got)} values where {len(expected)} were expected"
    at = int(np.flatnonzero(got != expected)[0])
    return f"choice {choice}, position {at}: {got[at]} where {expected[at]} was expected"
