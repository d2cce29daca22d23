"""Is a result the sample's own? Compared token by token and logprob by logprob with the simulator's pure function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from gateway.bench.load.expected import difference
from gateway.bench.load.replies import SampleFailure
from shared.wire.sdk.result import decode_sample_response

if TYPE_CHECKING:
    from gateway.bench.load.expected import Oracle
    from gateway.bench.load.workload import Sample, Workload
    from shared.core.result import SampleResult


class Verifier(Protocol):
    def complaint(self, payload: bytes, wanted: Sample) -> SampleFailure | None:
        """None when the encoded result is what `wanted` must give."""
        ...


class ResultVerifier:
    """`oracle`: what the upstream must answer; None where nobody can foretell it, then only counts are compared."""

    def __init__(self, workload: Workload, oracle: Oracle | None) -> None:
        self._workload = workload
        self._oracle = oracle

    def complaint(self, payload: bytes, wanted: Sample) -> SampleFailure | None:
        try:
            result = decode_sample_response(payload)
        except ValueError as error:
            return _wrong("result malformed", f"{error}")
        complaint = self._shape_complaint(result)
        if complaint is not None or self._oracle is None:
            return complaint
        return content_complaint(result, wanted, self._oracle)

    def _shape_complaint(self, result: SampleResult) -> SampleFailure | None:
        if len(result.sequences) != self._workload.num_samples:
            wanted = self._workload.num_samples
            return _wrong("wrong number of sequences", f"{wanted} asked for, {len(result.sequences)} came")
        for sequence in result.sequences:
            if not sequence.tokens or len(sequence.tokens) != len(sequence.logprobs):
                told = f"{len(sequence.tokens)} bytes of tokens, {len(sequence.logprobs)} of logprobs"
                return _wrong("wrong lengths", told)
        return None


def content_complaint(result: SampleResult, wanted: Sample, oracle: Oracle) -> SampleFailure | None:
    for choice, sequence in enumerate(result.sequences):
        tokens, logprobs = np.frombuffer(sequence.tokens, "<i4"), np.frombuffer(sequence.logprobs, "<f4")
        if found := difference(tokens, logprobs, wanted, choice, oracle):
            return _wrong(found.kind, found.detail)
    return None


def _wrong(kind: str, detail: str) -> SampleFailure:
    return SampleFailure(kind, detail, wrong=True)
