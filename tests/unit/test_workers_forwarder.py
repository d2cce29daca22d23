"""What goes into a request's head, and what may not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workers.forwarder import _UNFIT, _head, _is_fit


@given(st.text() | st.text(st.characters(max_codepoint=0x80)))
def test_the_short_way_to_tell_that_a_value_is_fit_finds_what_the_search_finds(value: str) -> None:
    assert _is_fit(value) == (_UNFIT.search(value) is None)


def test_a_value_that_no_header_may_hold_is_not_sent() -> None:
    head = _head("POST / HTTP/1.1\r\n", {"A": "1\r\nX: y", "B": "2", "C": "\x00", "D": "\xe9"}, 7)
    assert head == b"POST / HTTP/1.1\r\nB: 2\r\nContent-Length: 7\r\n\r\n"
