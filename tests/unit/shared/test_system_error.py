from __future__ import annotations

import errno
import socket

import pytest

from shared.system_error import system_reason


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), "Connection refused"),
        (OSError(errno.ECONNREFUSED, "Connect call failed ('127.0.0.1', 1)"), "Connection refused"),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "Name or service not known"),
        (OSError("Multiple exceptions: one, two"), "Multiple exceptions: one, two"),
        (TimeoutError(), ""),
    ],
)
def test_a_failed_call_is_given_in_the_words_of_the_system(error: OSError, reason: str) -> None:
    assert system_reason(error) == reason
