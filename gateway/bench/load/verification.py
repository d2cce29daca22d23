"""Compare a result with the expected one, token by token and logprob by logprob."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from gateway.bench.load.expected import difference
from gateway.bench.load.replies import SampleFailure
from shared.wire.sdk.result import decode_sample_response

if TYPE_CHECKING:
    from gateway.bench.load.expected import Oracle
    from gateway.bench.load.workload import Sample, Workload


class Verifier(Protocol):
    def complaint(self, payload: bytes, wanted: Sample) -> SampleFailure | None:
        """Return what is wrong with an encoded result, or None if it is the result of `wanted`."""
        ...


class ResultVerifier:
    """Check results against `oracle`; without one, check only counts and lengths."""

    def __init__(self, workload: Workload, oracle: Oracle | None) -> None:
        self._workload = workload
        self._oracle = oracle

    def complaint(self, payload: bytes, wanted: Sample) -> SampleFailure | None:
        try:
            result = decode_sample_response(payload)
        except ValueError as error:
            return SampleFailure("result malformed", f"{error}", wrong=True)
        if len(result.sequences) != self._workload.num_samples:
            counts = f"{self._workload.num_samples} expected, {len(result.sequences)} received"
            return SampleFailure("wrong number of sequences", counts, wrong=True)
        for sequence in result.sequences:
            if not sequence.tokens or len(sequence.tokens) != len(sequence.logprobs):
                lengths = f"{len(sequence.tokens)} bytes of tokens, {len(sequence.logprobs)} of logprobs"
                return SampleFailure("wrong lengths", lengths, wrong=True)
        if self._oracle is None:
            return None
        for choice, sequence in enumerate(result.sequences):
            tokens, logprobs = np.frombuffer(sequence.tokens, "<i4"), np.frombuffer(sequence.logprobs, "<f4")
            if found := difference(tokens, logprobs, wanted, choice, self._oracle):
                return SampleFailure(found.kind, found.detail, wrong=True)
        return None
