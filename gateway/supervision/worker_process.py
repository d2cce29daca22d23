"""One worker process as the supervisor holds it: spawned with its channel, given a slot, and watched until it ends.

The end is reported once, when the process has exited and its channel has been read to the end: its last message
(`Failed`) must not be overtaken by the exit that follows it.

Workers also need a place for their byte code. In containers Python often may not write it (PYTHONDONTWRITEBYTECODE, a
read-only file system), and every process then compiles all that it imports, which is more than half of its start. The
private run directory keeps it instead (12 MB).
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import msgspec

from shared.channel import MAX_LINE_BYTES, Prepare, Start, Status, decode_for_supervisor, encode

if TYPE_CHECKING:
    import signal
    from collections.abc import Mapping, Sequence
    from typing import Protocol

    from shared.channel import ToSupervisor, ToWorker
    from shared.config import WorkerConfig

    class Listener(Protocol):
        def on_message(self, serial: int, message: ToSupervisor) -> None: ...

        def on_exit(self, serial: int, code: int) -> None: ...


log = logging.getLogger("gateway.worker")

_STDERR: Final = 2
# The largest package that a worker imports; whether its byte code can be kept stands for all packages.
_PROBE: Final = "aiohttp"
_FORBIDDEN: Final = "PYTHONDONTWRITEBYTECODE"
_PREFIX: Final = "PYTHONPYCACHEPREFIX"


def worker_environ(environ: Mapping[str, str], run_dir: Path, *, kept: bool) -> dict[str, str]:
    """Return the environment of a worker. `kept`: Python can keep byte code where it looks for it by default."""
    if kept:
        return dict(environ)
    rest = {name: value for name, value in environ.items() if name != _FORBIDDEN}
    return {**rest, _PREFIX: str(run_dir / "bytecode")}


def is_kept(probe: str = _PROBE) -> bool:
    """Return True if the next process finds the byte code of what this one imports."""
    spec = importlib.util.find_spec(probe)
    if spec is None or spec.cached is None or spec.origin is None or Path(spec.cached).exists():
        return True
    return not sys.dont_write_bytecode and os.access(Path(spec.origin).parent, os.W_OK)


class WorkerProcess:
    """A process and the supervisor's end of its channel; `listener` is called on the event loop.

    `config` is None while it has no slot, like the spare. `started_at_s` is when it got its slot, in wall time.
    """

    def __init__(self, serial: int, popen: subprocess.Popen[bytes], sock: socket.socket, listener: Listener) -> None:
        self.serial = serial
        self.config: WorkerConfig | None = None
        self.started_at_s = time.time()
        self.status: Status | None = None
        self._popen = popen
        self._socket = sock
        self._listener = listener
        self._transport: asyncio.Transport | None = None
        self._channel_open = True
        self._exit_code: int | None = None

    @property
    def pid(self) -> int:
        return self._popen.pid

    def prepare(self) -> None:
        self.send(Prepare())

    def start(self, config: WorkerConfig, listening: socket.socket) -> None:
        """Make it the worker of a slot: send its configuration and the slot's listening socket."""
        self.config, self.started_at_s = config, time.time()
        if self._transport is None or self._transport.is_closing():
            return
        # A descriptor cannot go through the transport. So far only one short line was written to it, so this overtakes
        # nothing, and the kernel's buffer has room for at least the first part.
        line = encode(Start(config))
        try:
            sent = socket.send_fds(self._socket, [line], [listening.fileno()])
        except OSError as error:
            log.warning("a worker was gone when it got its slot", extra={"slot": config.slot, "reason": str(error)})
        else:
            self._transport.write(line[sent:])

    def send(self, message: ToWorker) -> None:
        """Send a message. A worker that is gone does not get it; its exit is reported anyway."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode(message))

    def kill(self, number: signal.Signals) -> None:
        # Popen does not signal a process that it has reaped, so the pid cannot belong to another process.
        self._popen.send_signal(number)

    # -- called by the event loop -------------------------------------------------------------------------------

    def attached(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def received(self, line: bytes) -> None:
        try:
            message = decode_for_supervisor(line)
        except msgspec.MsgspecError as error:
            log.error("a worker sent an invalid message", extra={"pid": self.pid, "reason": str(error)})
            return
        if isinstance(message, Status):
            self.status = message
        self._listener.on_message(self.serial, message)

    def channel_closed(self) -> None:
        self._channel_open = False
        self._report_end()

    def exited(self) -> None:
        self._exit_code = self._popen.wait()
        self._report_end()

    def _report_end(self) -> None:
        if self._exit_code is not None and not self._channel_open:
            self._listener.on_exit(self.serial, self._exit_code)


class _Channel(asyncio.Protocol):
    """The supervisor's end of the socket pair: splits bytes into lines."""

    def __init__(self, process: WorkerProcess) -> None:
        self._process = process
        self._partial = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._process.attached(self._transport)

    def data_received(self, data: bytes) -> None:
        self._partial += data
        *lines, rest = self._partial.split(b"\n")
        self._partial = rest
        for line in lines:
            self._process.received(bytes(line))
        if len(rest) > MAX_LINE_BYTES and self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._process.channel_closed()


async def spawn(command: Sequence[str], environ: Mapping[str, str], serial: int, listener: Listener) -> WorkerProcess:
    """Start a process that has no slot yet. Raises `OSError`."""
    ours, theirs = socket.socketpair()
    try:
        popen = _popen(command, environ, theirs.fileno())
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()
    process = WorkerProcess(serial, popen, ours, listener)
    loop = asyncio.get_running_loop()
    _watch_exit(loop, process)
    await loop.create_connection(lambda: _Channel(process), sock=ours)
    return process


def _popen(command: Sequence[str], environ: Mapping[str, str], channel_fd: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*command, "--channel-fd", str(channel_fd)],
        env=environ,
        pass_fds=(channel_fd,),
        stdin=subprocess.DEVNULL,
        # Standard output is only for the start line.
        stdout=_STDERR,
        # Its own process group: Ctrl-C in a terminal goes to the supervisor, which drains its workers.
        process_group=0,
    )


def _watch_exit(loop: asyncio.AbstractEventLoop, process: WorkerProcess) -> None:
    pidfd = os.pidfd_open(process.pid)

    def on_exit() -> None:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        process.exited()

    loop.add_reader(pidfd, on_exit)


def new_instance() -> str:
    """Return 16 random characters, new for every process: the owner of samples in the store."""
    return os.urandom(8).hex()
