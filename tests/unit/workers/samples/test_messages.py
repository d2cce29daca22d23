"""Messages between workers."""

from __future__ import annotations

import pytest

from shared.core.model import MAX_SEQ_ID, SampleKey
from shared.core.roll_call import gone_message, there_message
from workers.samples.messages import Cancel, Finish, Gone, There, cancel_message, finish_message, parse


def test_messages_come_back() -> None:
    key = SampleKey("a-_b", MAX_SEQ_ID)
    assert parse(cancel_message(key)) == Cancel(key)
    assert parse(finish_message("gws-x")) == Finish("gws-x")
    assert parse(there_message("a1")) == There("a1")
    assert parse(gone_message("a1")) == Gone("a1")


@pytest.mark.parametrize("message", [b"", b"cancel", b"cancel k", b"cancel k x", b"finish", b"dance", b"\xff"])
def test_what_another_version_sends_is_passed_over(message: bytes) -> None:
    assert parse(message) is None
