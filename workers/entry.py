"""The first lines of a worker process: adopt the channel, wait for the start, import the rest, run.

    python -m workers.entry --channel-fd N

Only the supervisor starts this. Nothing secret is on the command line: the configuration comes over the channel, and
with it the slot's listening socket. A spare is told first to prepare; from its start on it is a worker like any other.
"""

from __future__ import annotations

import argparse
import signal
import socket
import sys
from typing import TYPE_CHECKING

from shared.log import configure_logging
from workers.spare import warm_up
from workers.supervision import read_start

if TYPE_CHECKING:
    from shared.config import WorkerConfig


def main() -> int:
    parser = argparse.ArgumentParser(prog="workers.entry", description="One gateway worker; started by the supervisor.")
    parser.add_argument("--channel-fd", type=int, required=True)
    arguments = parser.parse_args()
    # Ctrl-C reaches the whole process group; only the supervisor's word counts.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    channel_socket = socket.socket(fileno=arguments.channel_fd)
    try:
        start, listener = read_start(channel_socket, warm_up)
    except EOFError:
        return 0
    return _serve(start.config, listener, channel_socket)


def _serve(config: WorkerConfig, listener: socket.socket, channel_socket: socket.socket) -> int:
    configure_logging(config.settings.log_format, config.settings.log_level, slot=config.slot)
    from workers.serving import serve  # here, since a spare has other ways to it

    return serve(config, listener, channel_socket)


if __name__ == "__main__":
    sys.exit(main())
