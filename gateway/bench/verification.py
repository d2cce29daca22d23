"""Is a result the sample's own? Compared token by token and logprob by logprob with the simulator's pure function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from shared.wire.proto import decode_sample_response

if TYPE_CHECKING:
    from gateway.bench.workload import Sample, Workload
    from shared.core.result import SampleResult, SequenceResult


@dataclass(frozen=True, slots=True)
class Complaint:
    kind: str
    detail: str


class Verifier(Protocol):
    def complaint(self, payload: bytes, wanted: Sample) -> Complaint | None:
        """None when the encoded result is what `wanted` must give."""
        ...


class ShapeVerifier:
    """For an upstream whose tokens nobody can foretell: counts and lengths only."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    def complaint(self, payload: bytes, wanted: Sample) -> Complaint | None:
        result = _decode(payload)
        return result if isinstance(result, Complaint) else _shape_complaint(result, self._workload)


class SimulatorVerifier:
    """For a gateway with the simulated vLLM behind it."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    def complaint(self, payload: bytes, wanted: Sample) -> Complaint | None:
        result = _decode(payload)
        if isinstance(result, Complaint):
            return result
        return _shape_complaint(result, self._workload) or self._content_complaint(result, wanted)

    def _content_complaint(self, result: SampleResult, wanted: Sample) -> Complaint | None:
        for choice, sequence in enumerate(result.sequences):
            tokens, logprobs = expected(self._workload, wanted, choice)
            if sequence.tokens != tokens.astype("<i4").tobytes():
                return Complaint("wrong tokens", _first_difference(sequence.tokens, tokens, "<i4", choice))
            if sequence.logprobs != logprobs.astype("<f4").tobytes():
                return Complaint("wrong logprobs", _first_difference(sequence.logprobs, logprobs, "<f4", choice))
        return None
