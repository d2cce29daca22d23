"""Everything that a worker imports, and the way into its event loop. What a spare imports ahead of its slot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import uvloop

from workers.memory import keep_what_is_freed
from workers.supervision import Supervision
from workers.worker import Worker

if TYPE_CHECKING:
    import socket

    from shared.config import WorkerConfig


def serve(config: WorkerConfig, listener: socket.socket, channel_socket: socket.socket) -> int:
    """Blocks until the worker has ended; the exit code."""
    keep_what_is_freed()
    return uvloop.run(_run(config, listener, channel_socket))


async def _run(config: WorkerConfig, listener: socket.socket, channel_socket: socket.socket) -> int:
    supervision = await Supervision.over(channel_socket)
    return await Worker(config, listener, supervision).run()
