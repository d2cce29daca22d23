"""Children of a run: ready, failing with their own words, and never left behind."""

from __future__ import annotations

import sys

import pytest

from gateway.bench.child import Child
from shared.core.errors import StartError
from tests.integration.gateway_process import alive
from tests.waiting import DEADLINE_S, eventually

READY = "import time; print('ready on http://127.0.0.1:1', flush=True); time.sleep(600)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
)
PARENT = (
    "import subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
    " print(child.pid, flush=True); time.sleep(600)"
)


def child(code: str) -> Child:
    return Child("the child", [sys.executable, "-c", code])


async def test_the_first_line_says_that_it_is_ready() -> None:
    one = child(READY)
    assert await one.start(DEADLINE_S) == "ready on http://127.0.0.1:1"
    assert await one.stop(DEADLINE_S) == -15
    assert not alive(one.pid)


async def test_one_that_ends_at_once_is_quoted() -> None:
    one = child("import sys; print('no such flag --x', file=sys.stderr); sys.exit(2)")
    with pytest.raises(StartError, match=r"(?s)the child ended at once with exit code 2.*no such flag --x"):
        await one.start(DEADLINE_S)
    assert await one.stop(1.0) == 2


async def test_one_that_is_never_ready_is_quoted() -> None:
    one = child("import sys, time; print('thinking', file=sys.stderr, flush=True); time.sleep(600)")
    with pytest.raises(StartError, match="the child was not ready after"):
        await one.start(0.2)
    await one.stop(DEADLINE_S)
    assert not alive(one.pid)


async def test_one_that_does_not_heed_sigterm_is_killed() -> None:
    one = child(STUBBORN)
    await one.start(DEADLINE_S)
    assert await one.stop(0.2) == -9


async def test_what_the_child_started_goes_with_it() -> None:
    one = child(PARENT)
    grandchild = int(await one.start(DEADLINE_S))
    assert alive(grandchild)
    await one.stop(DEADLINE_S)
    eventually(lambda: not alive(grandchild), "the grandchild's end")


async def test_one_that_was_never_started_stops() -> None:
    assert await child(READY).stop(1.0) is None
