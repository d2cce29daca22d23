"""What the HTTP edge accepts, and for how long it waits."""

from __future__ import annotations

from dataclasses import dataclass

from shared.config import KIB, MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Bounds of one client connection. The defaults are those of common servers unless a reason stands beside them."""

    url_bytes: int = 8 * KIB
    header_bytes: int = 16 * KIB
    head_bytes: int = 32 * KIB
    header_count: int = 100
    # Counted from the first byte of the request to the end of its headers.
    head_s: float = 30.0
    # A body has this long, plus the time that its bytes so far would take at the least rate.
    body_grace_s: float = 60.0
    # Far below any link that moves tokens for a living, far above what a trickling attacker pays for.
    least_bytes_per_s: int = 64 * KIB
    # A client that keeps its reply unread is looked at this often, and must have taken the least rate since.
    unread_s: float = 60.0
    keep_alive_s: float = 75.0
    # Requests parsed ahead of their turn; each costs about 3 KiB, and one read may hold 14,000 of the smallest.
    pipelined: int = 128
    # What is read and thrown away after an early reply: about what the socket buffers of both ends hold, so that a
    # client that blocks in send() gets to read why it was refused, instead of a reset.
    discard_bytes: int = 4 * MIB
    linger_s: float = 5.0
    # The transport asks the application to pause above this.
    write_buffer_bytes: int = 64 * KIB
    # What a connection reads ahead of its handler: as much as uvloop reads at once, so that a prompt of 32,768 tokens
    # arrives without a pause.
    unread_body_bytes: int = 256 * KIB
