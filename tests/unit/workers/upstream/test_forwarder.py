"""What goes into a request's head, and what may not."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from workers.upstream.forwarder import _head, _is_fit


@given(st.text() | st.text(st.characters(max_codepoint=0x80)))
def test_what_is_fit_is_tabs_and_printable_ascii(value: str) -> None:
    assert _is_fit(value) == (re.search(r"[^\t -~]", value) is None)


def test_a_value_that_no_header_may_hold_is_not_sent() -> None:
    head = _head("POST / HTTP/1.1\r\n", {"A": "1\r\nX: y", "B": "2", "C": "\x00", "D": "\xe9"}, 7)
    assert head == b"POST / HTTP/1.1\r\nB: 2\r\nContent-Length: 7\r\n\r\n"
