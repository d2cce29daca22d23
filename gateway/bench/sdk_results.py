"""What the SDK handed to its user, judged and counted. Pure but for the process' own memory.

Needs the standard library and numpy alone: it runs under the SDK's interpreter.
"""

from __future__ import annotations

import base64
import resource
from typing import TYPE_CHECKING, Any

import numpy as np

from gateway.bench.expected import Difference, difference

if TYPE_CHECKING:
    from gateway.bench.expected import Oracle
    from gateway.bench.tally import Tally
    from gateway.bench.workload import Sample


def complaint(result: Any, wanted: Sample, num_samples: int, oracle: Oracle | None) -> Difference | None:
    """What is wrong with a `SampleResponse`; without `oracle` only counts are compared."""
    if len(result.sequences) != num_samples:
        told = f"{num_samples} asked for, {len(result.sequences)} came"
        return Difference("wrong number of sequences", told)
    for choice, sequence in enumerate(result.sequences):
        tokens = np.asarray(sequence.tokens, "<i4")
        logprobs = np.asarray(sequence.logprobs or (), "<f4")
        if not tokens.size or tokens.size != logprobs.size:
            return Difference("wrong lengths", f"{tokens.size} tokens, {logprobs.size} logprobs")
        if oracle is not None and (found := difference(tokens, logprobs, wanted, choice, oracle)):
            return found
    return None


def report_of(tally: Tally, cpu_seconds: float) -> dict[str, Any]:
    """The fields of `messages.Report` that can be known here; bytes as base64, as msgspec reads them."""
    counts = ("completed", "failed", "wrong", "cancelled", "resubmitted", "duplicates", "abandoned_polls")
    values = ("submit_s", "latency_s", "spans_s", "promises_s")
    return {
        **{name: getattr(tally, name) for name in counts},
        **{name: base64.b64encode(getattr(tally, name).tobytes()).decode() for name in values},
        "failures": dict(tally.failures),
        "examples": tally.examples,
        "cpu_seconds": cpu_seconds,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
