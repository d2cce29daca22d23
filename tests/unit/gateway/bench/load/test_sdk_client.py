"""Results of the SDK: checked like those of the raw client, and reported in the same form."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gateway.bench.load import messages
from gateway.bench.load.expected import simulator_oracle
from gateway.bench.load.sdk_client import complaint, report_of
from gateway.bench.load.tally import LoadTally
from gateway.bench.load.workload import Workload, sample

WORKLOAD = Workload(seed=3, model="m", num_samples=2, max_tokens=4)
WANTED = sample(WORKLOAD, 5)
ORACLE = simulator_oracle(WORKLOAD)


def answer(*sequences: tuple[list[int], list[float] | None]) -> Any:
    return SimpleNamespace(sequences=[SimpleNamespace(tokens=tokens, logprobs=floats) for tokens, floats in sequences])


def right() -> list[tuple[list[int], list[float]]]:
    """Return a response as the SDK does: plain lists, logprobs widened to double."""
    return [(tokens.tolist(), logprobs.tolist()) for tokens, logprobs in (ORACLE(WANTED, choice) for choice in (0, 1))]


def kind_of(result: Any, *, verify: bool = True) -> str | None:
    found = complaint(result, WANTED, 2, ORACLE if verify else None)
    return found.kind if found is not None else None


def test_the_samples_own_result_is_right() -> None:
    assert kind_of(answer(*right())) is None


@pytest.mark.parametrize(
    ("sequences", "kind"),
    [
        (right()[:1], "wrong number of sequences"),
        (right()[::-1], "wrong tokens"),
        ([right()[0], (right()[1][0], [0.5] * 4)], "wrong logprobs"),
        ([right()[0], ([], [])], "wrong lengths"),
        ([right()[0], (right()[1][0], None)], "wrong lengths"),
        ([right()[0], (right()[1][0], right()[1][1][:-1])], "wrong lengths"),
    ],
)
def test_what_is_not_its_own_is_named(sequences: list[Any], kind: str) -> None:
    assert kind_of(answer(*sequences)) == kind


def test_where_nobody_can_foretell_the_result_only_counts_are_compared() -> None:
    assert kind_of(answer(*right()[::-1]), verify=False) is None
    assert kind_of(answer(*right()[:1]), verify=False) == "wrong number of sequences"


def test_the_driver_reads_the_report() -> None:
    tally = LoadTally()
    tally.succeed(1.0, 1.5, 2.0)
    tally.fail("APIStatusError", "sample 3: 400")
    line = json.dumps({"type": "report", **report_of(tally, 0.25)}).encode()
    told = messages.decode_for_driver(line)
    assert isinstance(told, messages.ClientReport)
    assert (told.completed, told.failed, told.failures, told.cpu_seconds) == (1, 1, {"APIStatusError": 1}, 0.25)
    assert np.frombuffer(told.latency_s, "<f4").tolist() == [1.0]
    assert np.frombuffer(told.spans_s, "<f8").tolist() == [1.5, 2.0]
    assert told.polls is None
    assert told.peak_rss_bytes > 1_000_000
