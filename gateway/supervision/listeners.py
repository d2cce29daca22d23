"""The public listening sockets: one per slot, opened before any worker, kept open until the last worker has ended.

All are bound to the same address with SO_REUSEPORT, so the kernel spreads connections over the slots. The supervisor
never accepts. It keeps the sockets open so that connections queued for a slot survive the slot's worker: a `kill -9`
resets no connection that was not accepted yet. The price is that the queue of a dead slot waits for its next worker,
so `steer` keeps new connections away from it: a short classic BPF program picks a random slot with a live worker. This
needs no privileges.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from gateway.settings.urls import url_host
from shared.core.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Sequence

log = logging.getLogger("gateway.listeners")

# Not in the standard library's socket module (asm-generic/socket.h).
_SO_ATTACH_REUSEPORT_CBPF: Final = 51
_BPF_LOAD_RANDOM: Final = (0x20, 0, 0, 0xFFFFF000 + 56)  # A = SKF_AD_OFF + SKF_AD_RANDOM
_BPF_MODULO: Final = 0x94  # A %= k
_BPF_JUMP_IF_EQUAL: Final = 0x15  # if A == k
_BPF_RETURN: Final = 0x06  # return k
_BPF_RETURN_A: Final = 0x16
# The kernel's limit for a program (BPF_MAXINSNS) minus the instructions around the table, two per slot.
_MAX_TABLE: Final = (4096 - 4) // 2


class Listeners:
    """The open sockets; `sockets[slot]` belongs to the slot. Steering counts them in the order of their `listen`."""

    def __init__(self, sockets: Sequence[socket.socket], host: str) -> None:
        self.sockets = list(sockets)
        self.host = host
        self.port: int = self.sockets[0].getsockname()[1]
        self._steerable = True

    @property
    def address(self) -> str:
        return f"{url_host(self.host)}:{self.port}"

    def steer(self, alive: Sequence[int]) -> None:
        """Send new connections only to these slots, or to all slots if none is alive; they queue there.

        Where the kernel cannot steer, this is logged once and the kernel keeps spreading connections over all slots.
        """
        slots = sorted(alive) or list(range(len(self.sockets)))
        if not self._steerable or len(self.sockets) == 1 or len(slots) > _MAX_TABLE:
            return
        program = steering_program(slots, len(self.sockets))
        code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
        buffer = ctypes.create_string_buffer(code, len(code))
        fprog = struct.pack("HL", len(program), ctypes.addressof(buffer))
        try:
            self.sockets[0].setsockopt(socket.SOL_SOCKET, _SO_ATTACH_REUSEPORT_CBPF, fprog)
        except OSError as error:
            self._steerable = False
            log.warning("new connections cannot be steered away from dead workers", extra={"reason": str(error)})

    def close(self) -> None:
        for listener in self.sockets:
            listener.close()


def steering_program(alive: Sequence[int], slots: int) -> list[tuple[int, int, int, int]]:
    """Return a BPF program that picks a random member of `alive`.

    An instruction of classic BPF is (code, jump if true, jump if false, k).
    """
    program = [_BPF_LOAD_RANDOM, (_BPF_MODULO, 0, 0, len(alive))]
    if list(alive) == list(range(slots)):
        return [*program, (_BPF_RETURN_A, 0, 0, 0)]
    for index, slot in enumerate(alive):
        program += [(_BPF_JUMP_IF_EQUAL, 0, 1, index), (_BPF_RETURN, 0, 0, slot)]
    return [*program, (_BPF_RETURN, 0, 0, alive[0])]


def open_listeners(host: str, port: int, slots: int, backlog: int) -> Listeners:
    """Bind and listen once per slot; with port 0 the first bind picks the port. Raises `StartError`."""
    family, address = resolve_host(host, port, "--host")
    sockets: list[socket.socket] = []
    try:
        _refuse_taken_port(family, address)
        for _ in range(slots):
            sockets.append(_listen(family, address, backlog))
            address = sockets[0].getsockname()
    except OSError as error:
        for opened in sockets:
            opened.close()
        raise StartError(bind_refusal(host, port, error, "--port")) from None
    warn_short_queue(backlog, somaxconn())
    return Listeners(sockets, host)


def open_single(host: str, port: int, flags: str = "--admin-") -> socket.socket:
    """Open one ordinary listening socket, for the admin address. Raises `StartError` with the flag to change."""
    family, address = resolve_host(host, port, f"{flags}host")
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise StartError(bind_refusal(host, port, error, f"{flags}port")) from None
    return listener


def resolve_host(host: str, port: int, flag: str) -> tuple[socket.AddressFamily, tuple[str | int, ...]]:
    """Return the family and the address to bind. Raises `StartError` if the name does not resolve."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError):
        raise StartError(f"{flag}: {host!r} is neither an address of this machine nor a name that resolves") from None
    # `localhost` is both families. IPv4 also works in containers without IPv6.
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, cast("tuple[str | int, ...]", address)


def _refuse_taken_port(family: socket.AddressFamily, address: tuple[str | int, ...]) -> None:
    # With SO_REUSEPORT we would join any other listener of this user and share its connections. Without it the bind
    # fails while anybody listens. SO_REUSEADDR ignores connections in TIME_WAIT.
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


def _listen(family: socket.AddressFamily, address: tuple[str | int, ...], backlog: int) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        listener.listen(backlog)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def bind_refusal(host: str, port: int, error: OSError, flag: str) -> str:
    """Explain why a bind failed, and what to change."""
    where = f"{url_host(host)}:{port}"
    if error.errno == errno.EADDRINUSE:
        return f"{where} is used by another process; stop it, or choose another {flag}"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is not an address of this machine; choose another {flag.replace('port', 'host')}"
    if error.errno == errno.EACCES:
        return f"{where} needs privileges; choose a {flag} of 1024 or above"
    return f"{where} cannot be listened on: {error.strerror}"


def somaxconn() -> int | None:
    """Return the kernel's limit for a listen queue, or None if the kernel does not report it."""
    try:
        return int(Path("/proc/sys/net/core/somaxconn").read_text())
    except (OSError, ValueError):
        return None


def warn_short_queue(backlog: int, limit: int | None) -> None:
    if limit is not None and backlog > limit:
        log.warning(
            "the kernel lowers --backlog; raise sysctl net.core.somaxconn",
            extra={"backlog": backlog, "somaxconn": limit},
        )
