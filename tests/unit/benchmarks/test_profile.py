"""The component to which a look at the stack counts."""

from __future__ import annotations

import pytest

from benchmarks.profile_worker import REST, component_of, shares, shares_table

TURN = ("main (workers/entry.py:37)", "run (uvloop/__init__.py:92)", "uv_run (core.c:452)")


@pytest.mark.parametrize(
    ("inner", "component"),
    [
        (("write (libc.so.6)",), "kernel: sockets"),
        (("epoll_ctl (libc.so.6)",), "kernel: sockets"),
        (
            ("post (workers/upstream/forwarder.py:60)", "ClientSession._request (aiohttp/client.py:10)"),
            "upstream client",
        ),
        (("decode_reply (shared/wire/vllm/reply.py:70)", "Py_DECREF (object.h:5)"), "translation (shared/wire)"),
        (("decode_reply (shared/wire/vllm/reply.py:70)", "at (csimdjson.so)"), "JSON of requests and replies"),
        (("feed_data (parser.c:6516)", "on_url (shared/http/connection.py:9)", "malloc (libc.so.6)"), "HTTP server"),
        (("submit (workers/samples/dispatcher.py:9)",), "dispatching and execution"),
        ((), "event loop and tasks"),
    ],
)
def test_the_innermost_frame_that_belongs_somewhere_decides(inner: tuple[str, ...], component: str) -> None:
    assert component_of((*TURN, *inner)) == component


def test_what_belongs_nowhere_is_the_rest() -> None:
    assert component_of(["Py_DECREF (object.h:537)"]) == REST


def test_looks_are_summed_and_waiting_left_out() -> None:
    turn = ";".join(TURN)
    lines = [f"{turn};write (libc.so.6) 3", f"{turn};epoll_pwait (libc.so.6) 90", f"{turn} 1", "torn", ""]
    lines.append(
        "_worker (thread.py:81);PyThread_acquire_lock_timed (libpython.so);0x7f (libc.so.6);0x7e (libc.so.6) 50"
    )
    # For the interpreter's lock, which another thread holds.
    lines.append(
        f"{turn};loop___uvtimer_callback (loop.c:94556);pthread_cond_timedwait (libc.so.6);0x7f (libc.so.6) 70"
    )
    found = shares(lines)
    assert found == {"kernel: sockets": 3, "event loop and tasks": 1}
    told = shares_table(found, 0.4).splitlines()
    assert [cell.strip() for cell in told[2].split("|")[1:-1]] == ["kernel: sockets", "75.0%", "300 us"]
