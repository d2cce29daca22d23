"""Redis' error replies to our errors: one table, by the first word of what it says."""

from __future__ import annotations

import re
from typing import Final

from shared.store.base import StoreError, StoreFull, StoreRefused, StoreUnavailable

NO_SCRIPT: Final = "NOSCRIPT"
READ_ONLY: Final = "READONLY"
_REDIRECT: Final = re.compile(r"(MOVED|ASK) [0-9]+ [^ ]*:[0-9]{1,5}(?: |$)")
_FULL: Final = ("OOM",)
# The server is there, and cannot at the moment: it starts, is a replica, fails over, cannot save, has no room.
_NOT_NOW: Final = (
    "LOADING",
    "MASTERDOWN",
    READ_ONLY,
    "TRYAGAIN",
    "CLUSTERDOWN",
    "BUSY",
    "MISCONF",
    "NOREPLICAS",
    "ERR max number of clients",
)


class Redirected(StoreRefused):
    """A cluster's node answers that a key is elsewhere. `asking`: this once only, its slot is on the move."""

    def __init__(self, text: str) -> None:
        super().__init__("this Redis is a node of a cluster; use redis+cluster://")
        kind, _, where = text.split(" ")[:3]
        host, _, port = where.rpartition(":")
        self.asking = kind == "ASK"
        self.host = host
        self.port = int(port)


def error_of(reply: Exception) -> StoreError:
    """The error behind a `hiredis.ReplyError`; a command that was refused was not executed."""
    text = str(reply)
    if _REDIRECT.match(text):
        return Redirected(text)
    if text.startswith(_FULL):
        return StoreFull("Redis is full (maxmemory)")
    # A script's failure repeats the inner error in the middle of its own.
    if "OOM command not allowed" in text:
        return StoreFull("Redis is full (maxmemory)")
    if text.startswith(_NOT_NOW):
        return StoreUnavailable(f"Redis cannot at the moment: {text}", maybe_done=False)
    return StoreRefused(f"Redis refuses: {text}")
