from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.wire.passing import traceparent_of

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_a_traceparent_is_passed_on_as_it_is() -> None:
    assert traceparent_of(PARENT.encode()) == PARENT


def test_of_a_later_version_what_is_known_is_passed_on() -> None:
    later = PARENT.replace("00-", "01-", 1)
    assert traceparent_of(f"{later}-what-else".encode()) == later


@pytest.mark.parametrize(
    "header",
    [
        None,
        b"",
        PARENT.upper().encode(),
        f"{PARENT}-more".encode(),  # version 00 has no more
        PARENT.replace("00-", "ff-", 1).encode(),
        PARENT.replace("4bf92f3577b34da6a3ce929d0e0e4736", "0" * 32).encode(),
        PARENT.replace("00f067aa0ba902b7", "0" * 16).encode(),
        f"{PARENT}\r\nX-Evil: 1".encode(),
        f"{PARENT}\n".encode(),
    ],
)
def test_anything_else_is_not(header: bytes | None) -> None:
    assert traceparent_of(header) is None


@given(st.binary(max_size=80) | st.from_regex(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}.*"))
def test_what_is_passed_on_never_breaks_a_header(header: bytes) -> None:
    passed = traceparent_of(header)
    assert passed is None or (len(passed) == 55 and passed.isascii() and passed.isprintable())
