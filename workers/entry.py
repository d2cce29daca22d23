"""A worker process from its first line: adopt the channel, warm up, wait for the start, run.

    python -m workers.entry --channel-fd N

Only the supervisor starts this. Nothing secret is on the command line: the configuration comes over the channel, and
the slot's listening socket with it.

A spare is a process that has no slot yet. It imports everything that a worker needs, then reports "warm" each second
until it gets a slot; from then on it is a worker like any other. Its imports run beside workers under load, so they get
a low priority. Without privileges a process can lower a priority but never raise it again. On Linux, however, a
priority belongs to a thread: a separate thread imports, and the main thread, which will serve, keeps the normal one.

The worker's modules are imported inside functions, so that a spare can choose when.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import os
import select
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING, Final

from shared.channel import STATUS_INTERVAL_S, Warm, encode
from shared.log import configure_logging
from workers.supervision import Supervision, read_start

if TYPE_CHECKING:
    from shared.config import WorkerConfig

# The Redis URL decides which store is needed, and a spare does not know it yet; it is nearly always this one.
_IMPORTED_AHEAD: Final = ("uvloop", "shared.store.one_server", "workers.worker")
# This gives a third of a busy process's share. With less, the next crash on a busy machine could come before the spare
# is warm.
_NICENESS: Final = 5
# How soon the end of the imports is noticed. A look costs microseconds.
_LOOK_EVERY_S: Final = 0.1
# The numbers of these options in glibc.
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
# Above this size glibc asks the kernel for blank pages and returns them at once (upstream/client/connection.py).
# Smaller blocks are kept and reused, up to a limit; by default glibc would return the body of each long prompt.
OWN_PAGES_FROM_BYTES: Final = 4 * 1024 * 1024
_KEPT_FREE_BYTES: Final = 32 * 1024 * 1024


def main() -> int:
    """Run one worker, from its command line to its exit code."""
    parser = argparse.ArgumentParser(prog="workers.entry", description="One gateway worker; started by the supervisor.")
    parser.add_argument("--channel-fd", type=int, required=True)
    arguments = parser.parse_args()
    # Ctrl-C reaches the whole process group, but only the supervisor's orders count.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    channel_socket = socket.socket(fileno=arguments.channel_fd)
    try:
        start, listener = read_start(channel_socket, warm_up)
    except EOFError:
        return 0
    configure_logging(start.config.settings.log_format, start.config.settings.log_level, slot=start.config.slot)
    return serve(start.config, listener, channel_socket)


def serve(config: WorkerConfig, listener: socket.socket, channel_socket: socket.socket) -> int:
    """Serve until the worker has ended, and return its exit code."""
    import uvloop

    keep_freed_memory()
    return uvloop.run(_run(config, listener, channel_socket))


async def _run(config: WorkerConfig, listener: socket.socket, channel_socket: socket.socket) -> int:
    from workers.worker import Worker

    supervision = await Supervision.over(channel_socket)
    return await Worker(config, listener, supervision).run()


def keep_freed_memory() -> None:
    """Make this process keep small freed blocks for reuse, if the C library is glibc."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_MMAP_THRESHOLD, OWN_PAGES_FROM_BYTES)
        libc.mallopt(_TRIM_THRESHOLD, _KEPT_FREE_BYTES)


# -- before there is a slot


def warm_up(channel_socket: socket.socket) -> None:
    """Import everything that a worker needs, and return when there is something to read.

    Raise `EOFError` if the supervisor is gone, and `ImportError`.
    """
    importer = threading.Thread(target=_import_at_leisure, name="importer", daemon=True)
    importer.start()
    while not _readable(channel_socket, _LOOK_EVERY_S):
        if not importer.is_alive():
            _import_all()  # raises an error of the thread again, which ends the process
            _report_warm(channel_socket)
            return


def _import_at_leisure() -> None:
    os.nice(_NICENESS)
    _import_all()
    # None of it is ever garbage, so the collector need not look at it when the worker starts (worker.py).
    gc.freeze()


def _import_all() -> None:
    for name in _IMPORTED_AHEAD:
        importlib.import_module(name)


def _report_warm(channel_socket: socket.socket) -> None:
    called = False
    while not called:
        try:
            channel_socket.sendall(encode(Warm()))
        except OSError:
            raise EOFError("the supervisor closed the channel") from None
        called = _readable(channel_socket, STATUS_INTERVAL_S)


def _readable(channel_socket: socket.socket, timeout_s: float) -> bool:
    return bool(select.select([channel_socket], [], [], timeout_s)[0])


if __name__ == "__main__":
    sys.exit(main())
