"""The first lines of a worker process: adopt the inherited descriptors, read the start message, run.

    python -m workers.entry --listen-fd N --channel-fd M

Only the supervisor starts this. Nothing secret is on the command line: the configuration comes over the channel.
"""

from __future__ import annotations

import argparse
import signal
import socket
import sys
from typing import TYPE_CHECKING

import uvloop

from shared.log import configure_logging
from workers.supervision import Supervision, read_start
from workers.worker import Worker

if TYPE_CHECKING:
    from shared.config import WorkerConfig


def main() -> int:
    parser = argparse.ArgumentParser(prog="workers.entry", description="One gateway worker; started by the supervisor.")
    parser.add_argument("--listen-fd", type=int, required=True)
    parser.add_argument("--channel-fd", type=int, required=True)
    arguments = parser.parse_args()
    # Ctrl-C reaches the whole process group; only the supervisor's word counts.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    channel_socket = socket.socket(fileno=arguments.channel_fd)
    listener = socket.socket(fileno=arguments.listen_fd)
    try:
        config = read_start(channel_socket).config
    except EOFError:
        return 0
    configure_logging(config.settings.log_format, config.settings.log_level, slot=config.slot)
    return uvloop.run(_run(config, listener, channel_socket))


async def _run(config: WorkerConfig, listener: socket.socket, channel_socket: socket.socket) -> int:
    supervision = await Supervision.over(channel_socket)
    return await Worker(config, listener, supervision).run()


if __name__ == "__main__":
    sys.exit(main())
