"""The worker's end of the control channel: orders in, status out, and the news that the supervisor is gone."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from shared import channel

if TYPE_CHECKING:
    import socket

    from shared.channel import Start, ToSupervisor, ToWorker


def read_start(sock: socket.socket) -> Start:
    """The first line, before there is an event loop; reads not a byte of what follows it.

    Raises `EOFError` when the supervisor is gone, `ValueError` on anything but a start.
    """
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = sock.recv(1)
        if not byte:
            raise EOFError("the supervisor closed the channel")
        line += byte
    try:
        message = channel.decode_for_worker(bytes(line))
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a control message: {error}") from error
    if not isinstance(message, channel.Start):
        raise ValueError(f"expected start, got {type(message).__name__}")
    return message


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
        """Best effort: a supervisor that is gone is noticed by `next_order`."""
        if not self._writer.is_closing():
            self._writer.write(channel.encode(message))

    async def next_order(self) -> ToWorker | None:
        """The next message; None when the supervisor is gone."""
        try:
            line = await self._reader.readline()
        except ConnectionError:
            # It died with words of ours unread: the kernel reports a reset in place of an end.
            return None
        return channel.decode_for_worker(line) if line.endswith(b"\n") else None

    async def close(self) -> None:
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError:
            pass
