"""Which slot of a cluster a key belongs to, and how a cluster tells whose a slot is. Pure."""

from __future__ import annotations

from binascii import crc_hqx
from dataclasses import dataclass
from typing import Any, Final

SLOTS: Final = 16384


@dataclass(frozen=True, slots=True)
class SlotRange:
    """Slots from `first` to `last` inclusive, and where their master is."""

    first: int
    last: int
    host: str
    port: int


def slot_of(key: str) -> int:
    """The slot of a key: of what stands between its first braces, where there is something, else of all of it."""
    _, opened, rest = key.partition("{")
    tag, closed, _ = rest.partition("}")
    return crc_hqx((tag if opened and closed and tag else key).encode(), 0) % SLOTS


def parse_slots(reply: Any, asked_host: str) -> list[SlotRange]:
    """The reply to CLUSTER SLOTS. A node that does not know its own address is where it was asked."""
    return [
        SlotRange(int(first), int(last), (master[0] or b"").decode().strip("?") or asked_host, int(master[1]))
        for first, last, master, *_ in reply
    ]
