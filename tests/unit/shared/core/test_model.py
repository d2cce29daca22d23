"""Values tell in a log what they are, and nothing of what users sent or got."""

from __future__ import annotations

import pytest

from shared.core.lifecycle import State
from shared.core.model import SampleSpec, SamplingParams, Value
from shared.core.record import Claim, Header, Record

SPEC = SampleSpec(b"101,102", 2, 1, SamplingParams(max_tokens=4))


def test_bytes_are_not_shown() -> None:
    record = Record(Header(State.READY, Claim("w" * 16, 1, 1, b"digest")), memoryview(b"tokens"))
    shown = repr(SPEC) + repr(record)
    assert "max_tokens=4" in shown and "READY" in shown
    assert not any(secret in shown for secret in ("101", "tokens'", "digest", "memory"))


def test_values_do_not_change_and_are_compared() -> None:
    assert SPEC == SampleSpec(b"101,102", 2, 1, SamplingParams(max_tokens=4))
    assert isinstance(SPEC, Value)
    with pytest.raises(AttributeError):
        SPEC.num_samples = 2  # type: ignore[misc]
