"""What a sample must bring, and how a result differs from it. Pure.

Needs the standard library and numpy alone: it runs under an SDK's interpreter, too.
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
    """`kind`: one of a bounded set of words; `detail`: for a person."""

    kind: str
    detail: str


def simulator_oracle(workload: Workload) -> Oracle:
    """What the simulated vLLM answers: choice i of a sample is drawn with its seed + i, as in vLLM."""

    def oracle(wanted: Sample, choice: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        return sampled(workload.model, wanted.prompt, wanted.seed + choice, workload.max_tokens)

    return oracle


def difference(
    tokens: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32], wanted: Sample, choice: int, oracle: Oracle
) -> Difference | None:
    """Of one sequence, `tokens` int32[T] and `logprobs` float32[T], bit by bit; None when there is none."""
    expected_tokens, expected_logprobs = oracle(wanted, choice)
    if tokens.tobytes() != expected_tokens.tobytes():
        return Difference("wrong tokens", first_difference(tokens, expected_tokens, choice))
    if logprobs.tobytes() != expected_logprobs.tobytes():
        return Difference("wrong logprobs", first_difference(logprobs, expected_logprobs, choice))
    return None


def first_difference(got: npt.NDArray[np.generic], expected: npt.NDArray[np.generic], choice: int) -> str:
    """Where two arrays part, for a person."""
    if len(got) != len(expected):
        return f"choice {choice}: {len(got)} values where {len(expected)} were expected"
    at = int(np.flatnonzero(got != expected)[0])
    return f"choice {choice}, position {at}: {got[at]} where {expected[at]} was expected"
