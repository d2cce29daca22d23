"""A spare's time before it has a slot: import what a worker is made of, then say "warm" every second until the start.

What it imports runs beside workers under load, so it takes what they leave. Without privileges a priority can be
lowered and never raised again, but on Linux it belongs to a thread: one of its own imports, and the main thread, which
will serve, stays what it was.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import threading
from typing import TYPE_CHECKING, Final

from shared.channel import STATUS_INTERVAL_S, Warm, encode

if TYPE_CHECKING:
    import socket

# The store's module is chosen by the URL, which is not known yet; it is nearly always this one.
_IMPORTED_AHEAD: Final = ("shared.store.redis", "workers.serving")
# A third of what a busy process gets. With less, the next fault on a busy machine comes before the spare is warm.
_NICENESS: Final = 5
# How soon it is noticed that all is imported; a look costs microseconds.
_LOOK_EVERY_S: Final = 0.1


def warm_up(channel_socket: socket.socket) -> None:
    """Returns when there is something to read. Raises `EOFError` when the supervisor is gone, `ImportError`."""
    importer = threading.Thread(target=_import_at_leisure, name="importer", daemon=True)
    importer.start()
    while not _readable(channel_socket, _LOOK_EVERY_S):
        if not importer.is_alive():
            _import_all()  # what broke in the thread breaks here, and ends the process
            _say_warm_until_called(channel_socket)
            return


def _import_at_leisure() -> None:
    os.nice(_NICENESS)
    _import_all()
    # None of it is garbage, ever: a worker that starts is spared the look through it (worker.py).
    gc.freeze()


def _import_all() -> None:
    for name in _IMPORTED_AHEAD:
        importlib.import_module(name)


def _say_warm_until_called(channel_socket: socket.socket) -> None:
    called = False
    while not called:
        try:
            channel_socket.sendall(encode(Warm()))
        except OSError:
            raise EOFError("the supervisor closed the channel") from None
        called = _readable(channel_socket, STATUS_INTERVAL_S)


def _readable(channel_socket: socket.socket, timeout_s: float) -> bool:
    return bool(select.select([channel_socket], [], [], timeout_s)[0])
