"""Ports that stay free while nobody listens on them: for what starts again on its address."""

from __future__ import annotations

import os
import random
import socket
from typing import Final

# Below those from which the kernel takes the ports of connections: one of them could be taken at any moment.
_FIRST, _LAST = 12_000, 32_000
_TRIES: Final = 100


def free_port() -> int:
    """Not one of those that another process of the same test run picks from."""
    process, processes = _place()
    for _ in range(_TRIES):
        port = random.randrange(_FIRST + process, _LAST, processes)
        if is_free(port):
            return port
    raise AssertionError(f"no free port from {_FIRST} to {_LAST}")


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _place() -> tuple[int, int]:
    """Which of how many processes of pytest-xdist this is."""
    name = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    return int(name.removeprefix("gw")), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
