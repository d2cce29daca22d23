"""The stored form: fixed bytes, and every header is read as it was written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.core.lifecycle import State
from shared.core.record import HEADER_BYTES, BadRecord, Claim, Header, pack, unpack, unpack_header

CLAIM = Claim("0123456789abcdef", 3, 16, bytes(range(16)))
STORED = [state for state in State if state is not State.GONE]


def test_golden_bytes() -> None:
    """Other versions of the gateway read these bytes, so the layout is a contract."""
    assert pack(State.READY, CLAIM, b"payload") == (
        b"R-\x00\x03\x00\x00\x00\x10" + bytes(range(16)) + b"0123456789abcdef" + b"payload"
    )


@given(
    state=st.sampled_from(STORED),
    attempt=st.integers(0, 2**16 - 1),
    n=st.integers(0, 2**32 - 1),
    digest=st.binary(min_size=16, max_size=16),
    payload=st.binary(max_size=64),
)
def test_header_and_payload_come_back(state: State, attempt: int, n: int, digest: bytes, payload: bytes) -> None:
    claim = Claim("fedcba9876543210", attempt, n, digest)
    record = unpack(pack(state, claim, payload))
    assert record.header == Header(state, claim)
    assert record.payload == payload


@pytest.mark.parametrize("clock", [b"r", b"a"])
def test_a_started_clock_is_seen(clock: bytes) -> None:
    data = bytearray(pack(State.FAILED, CLAIM))
    data[1:2] = clock
    assert unpack_header(bytes(data)).handed_over


@pytest.mark.parametrize("length", range(HEADER_BYTES))
def test_a_cut_record_is_refused(length: int) -> None:
    with pytest.raises(BadRecord):
        unpack(pack(State.READY, CLAIM)[:length])


def test_an_unknown_state_is_refused() -> None:
    with pytest.raises(BadRecord):
        unpack(b"X" + pack(State.READY, CLAIM)[1:])
