"""A spare's wait for its slot, over a real socket pair."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from shared import channel
from workers import entry

if TYPE_CHECKING:
    from collections.abc import Iterator

    Ends = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """The supervisor's and the spare's."""
    supervisor, worker = socket.socketpair()
    yield supervisor, worker
    supervisor.close()
    worker.close()
    gc.unfreeze()


def test_says_that_it_is_warm_until_it_is_called(ends: Ends) -> None:
    supervisor, worker = ends
    waiting = threading.Thread(target=entry.warm_up, args=(worker,))
    waiting.start()
    with supervisor.makefile("rb") as lines:
        assert [channel.decode_for_supervisor(lines.readline()) for _ in range(2)] == [channel.Warm()] * 2
    supervisor.sendall(b"start")
    waiting.join()
    assert worker.recv(100) == b"start"


def test_hears_that_its_supervisor_is_gone(ends: Ends) -> None:
    supervisor, worker = ends
    supervisor.close()
    entry.warm_up(worker)
    assert worker.recv(1) == b""


def test_what_cannot_be_imported_is_no_spare(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "_IMPORTED_AHEAD", ("workers.no_such_module",))
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with pytest.raises(ImportError, match="no_such_module"):
        entry.warm_up(ends[1])


def test_its_own_priority_stays_what_it_was(ends: Ends) -> None:
    supervisor, worker = ends
    supervisor.sendall(b"start")
    before = os.getpriority(os.PRIO_PROCESS, 0)
    entry.warm_up(worker)
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_before_its_start_a_worker_imports_nothing_large() -> None:
    """Else a spare would import it at full priority, beside workers under load."""
    script = "import sys, workers.entry; print(*(set(sys.modules) & {'numpy', 'aiohttp', 'uvicorn', 'starlette'}))"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, text=True)
    assert loaded.stdout.split() == []
