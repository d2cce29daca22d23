"""The worker's end of the control channel: orders in, status out, and the end of the supervisor."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Final

import msgspec

from shared import channel

if TYPE_CHECKING:
    from collections.abc import Callable

    from shared.channel import ToSupervisor, ToWorker


# A configuration with some thousand keys fits; a longer one takes more reads.
_CHUNK_BYTES: Final = 1 << 16


def read_start(sock: socket.socket, prepare: Callable[[socket.socket], None]) -> tuple[channel.Start, socket.socket]:
    """Return the start order and the slot's listening socket. Call `prepare` first if the supervisor asks for that.

    There is no event loop yet. Raise `EOFError` if the supervisor is gone, `ValueError` for any other order.
    """
    order, listener = _read_order(sock)
    if isinstance(order, channel.Prepare):
        prepare(sock)
        order, listener = _read_order(sock)
    if not isinstance(order, channel.Start) or listener is None:
        raise ValueError(f"expected start and a socket, got {type(order).__name__} and {listener}")
    return order, listener


def _read_order(sock: socket.socket) -> tuple[channel.ToWorker, socket.socket | None]:
    """Read one line, and the socket that came with its first byte, but no byte of what follows."""
    first, descriptors, _, _ = socket.recv_fds(sock, 1, 1)
    listener = socket.socket(fileno=descriptors[0]) if descriptors else None
    if listener is not None:
        listener.set_inheritable(False)  # recv_fds ignores MSG_CMSG_CLOEXEC
    line = bytearray(first)
    while not line.endswith(b"\n"):
        ahead = sock.recv(_CHUNK_BYTES, socket.MSG_PEEK)
        if not ahead:
            raise EOFError("the supervisor closed the channel")
        line += sock.recv(ahead.find(b"\n") + 1 or len(ahead))
    try:
        return channel.decode_for_worker(bytes(line)), listener
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a control message: {error}") from error


class Supervision:
    """The channel on the event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, sock: socket.socket) -> Supervision:
        sock.setblocking(False)
        reader, writer = await asyncio.open_unix_connection(sock=sock, limit=channel.MAX_LINE_BYTES)
        return cls(reader, writer)

    def tell(self, message: ToSupervisor) -> None:
        """Send a message, unless the supervisor is gone, which `next_order` notices."""
        if not self._writer.is_closing():
            self._writer.write(channel.encode(message))

    async def next_order(self) -> ToWorker | None:
        """Return the next message, or None if the supervisor is gone."""
        try:
            line = await self._reader.readline()
        except ConnectionError:
            # It died without reading all that we sent: then the kernel reports a reset instead of an end.
            return None
        return channel.decode_for_worker(line) if line.endswith(b"\n") else None

    async def close(self) -> None:
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError:
            pass
