"""Redis' error replies to our errors: one table, by the first word of what it says."""

from __future__ import annotations

from typing import Final

from shared.store.base import StoreError, StoreFull, StoreRefused, StoreUnavailable

NO_SCRIPT: Final = "NOSCRIPT"
_FULL: Final = ("OOM",)
# The server is there, and cannot at the moment: it starts, is a replica, fails over, cannot save, has no room.
_NOT_NOW: Final = (
    "LOADING",
    "MASTERDOWN",
    "READONLY",
    "TRYAGAIN",
    "CLUSTERDOWN",
    "BUSY",
    "MISCONF",
    "NOREPLICAS",
    "ERR max number of clients",
)


def error_of(reply: Exception) -> StoreError:
    """The error behind a `hiredis.ReplyError`; a command that was refused was not executed."""
    text = str(reply)
    if text.startswith(_FULL):
        return StoreFull("Redis is full (maxmemory)")
    # A script's failure repeats the inner error in the middle of its own.
    if "OOM command not allowed" in text:
        return StoreFull("Redis is full (maxmemory)")
    if text.startswith(_NOT_NOW):
        return StoreUnavailable(f"Redis cannot at the moment: {text}", maybe_done=False)
    return StoreRefused(f"Redis refuses: {text}")
