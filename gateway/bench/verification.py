"""Is a result the sample's own? Compared token by token and logprob by logprob with the simulator's pure function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from gateway.bench.replies import Broken
from gateway.simulator.tokens import sampled
from shared.wire.proto import decode_sample_response

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.bench.workload import Sample, Workload
    from shared.core.result import SampleResult

    # (sample, choice) -> tokens int32[T], logprobs float32[T]
    Oracle = Callable[[Sample, int], tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]]


class Verifier(Protocol):
    def complaint(self, payload: bytes, wanted: Sample) -> Broken | None:
        """None when the encoded result is what `wanted` must give."""
        ...


class ResultVerifier:
    """`oracle`: what the upstream must answer; None where nobody can foretell it, then only counts are compared."""

    def __init__(self, workload: Workload, oracle: Oracle | None) -> None:
        self._workload = workload
        self._oracle = oracle

    def complaint(self, payload: bytes, wanted: Sample) -> Broken | None:
        try:
            result = decode_sample_response(payload)
        except ValueError as error:
            return _wrong("result malformed", f"{error}")
        complaint = self._shape_complaint(result)
        if complaint is not None or self._oracle is None:
            return complaint
        return content_complaint(result, wanted, self._oracle)

    def _shape_complaint(self, result: SampleResult) -> Broken | None:
        if len(result.sequences) != self._workload.num_samples:
            wanted = self._workload.num_samples
            return _wrong("wrong number of sequences", f"{wanted} asked for, {len(result.sequences)} came")
        for sequence in result.sequences:
            if not sequence.tokens or len(sequence.tokens) != len(sequence.logprobs):
                told = f"{len(sequence.tokens)} bytes of tokens, {len(sequence.logprobs)} of logprobs"
                return _wrong("wrong lengths", told)
        return None


def content_complaint(result: SampleResult, wanted: Sample, oracle: Oracle) -> Broken | None:
    for choice, sequence in enumerate(result.sequences):
        tokens, logprobs = oracle(wanted, choice)
        if sequence.tokens != tokens.astype("<i4").tobytes():
            return _wrong("wrong tokens", first_difference(np.frombuffer(sequence.tokens, "<i4"), tokens, choice))
        if sequence.logprobs != logprobs.astype("<f4").tobytes():
            got = np.frombuffer(sequence.logprobs, "<f4")
            return _wrong("wrong logprobs", first_difference(got, logprobs, choice))
    return None


def first_difference(got: npt.NDArray[np.generic], expected: npt.NDArray[np.generic], choice: int) -> str:
    """Where two arrays part, for a person."""
    if len(got) != len(expected):
        return f"choice {choice}: {len(got)} values where {len(expected)} were expected"
    at = int(np.flatnonzero(got != expected)[0])
    return f"choice {choice}, position {at}: {got[at]} where {expected[at]} was expected"


def _wrong(kind: str, detail: str) -> Broken:
    return Broken(kind, detail, wrong=True)


def simulator_oracle(workload: Workload) -> Oracle:
    """What the simulated vLLM answers: choice i of a sample is drawn with its seed + i, as in vLLM."""

    def oracle(wanted: Sample, choice: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        return sampled(workload.model, wanted.prompt, wanted.seed + choice, workload.max_tokens)

    return oracle
