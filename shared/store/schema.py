"""The names of all keys and channels in Redis, and the form of everything small that is stored under them. Pure.

Braces mark the part of a name that decides its slot on a cluster: everything of a sampling session is in one slot,
everything of a worker instance in another, and each sample falls wherever its whole name does, so that payloads spread
over all shards. The record of a sample has its own module, `shared/core/record.py`.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, Final

from shared.core.errors import StoreRefused
from shared.core.lifecycle import State
from shared.core.model import SampleKey
from shared.store.contract import LogEntry, LogPage, SessionState, StoreInfo


class Keys:
    """Build names that all start with one prefix, so that several gateways can share a server."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.instances = f"{prefix}:w"
        self.refills = f"{prefix}:r"
        self.roll = f"{prefix}:t"
        self.upstreams = f"{prefix}:u"
        self.unfetched = f"{prefix}:q"
        # Channels.
        self.announcements = f"{prefix}:a:"
        self.control_all = f"{prefix}:x"

    def sample(self, key: SampleKey) -> str:
        return f"{self.prefix}:s:{key.session_key}:{key.seq_id}"

    def log(self, session_key: str, clone_id: int) -> str:
        return f"{self.prefix}:d:{{{session_key}}}:{clone_id}"

    def open_set(self, owner: str) -> str:
        return f"{self.prefix}:o:{{{owner}}}"

    def lease(self, owner: str) -> str:
        return f"{self.prefix}:e:{{{owner}}}"

    def inbox(self, owner: str) -> str:
        return f"{self.prefix}:i:{{{owner}}}"

    def session(self, session_id: str) -> str:
        return f"{self.prefix}:n:{session_id}"

    def sessions_of(self, owner_tag: str) -> str:
        return f"{self.prefix}:m:{owner_tag}"

    def clones(self, session_key: str) -> str:
        return f"{self.prefix}:c:{{{session_key}}}"

    def lock(self, name: str) -> str:
        return f"{self.prefix}:k:{name}"

    def announcement(self, session_key: str) -> str:
        return f"{self.announcements}{{{session_key}}}"

    def announced(self, channel: str) -> str:
        """Return the session key in the name of a channel of announcements."""
        return channel[len(self.announcements) + 1 : -1]

    def control(self, owner: str) -> str:
        return f"{self.prefix}:x:{{{owner}}}"


def member(key: SampleKey) -> str:
    """Return the name of a sample in its owner's open set."""
    return f"{key.session_key}:{key.seq_id}"


def key_of(text: str) -> SampleKey:
    """Return the sample that `member` named."""
    session_key, _, seq_id = text.rpartition(":")
    return SampleKey(session_key, int(seq_id))


SEQ_BITS: Final = 32
# The sections that `store_info` reads; the whole of INFO costs a server seven times as much.
INFO_SECTIONS: Final = ("server", "memory", "stats")
_OLDEST_REDIS: Final = (7, 0)
_NUMBER: Final = re.compile(r"[0-9]{1,19}")
_RUN_ID: Final = re.compile(rb"[0-9a-fA-F]{5}")
_FINISHED: Final = "F"
_DELIVERABLE: Final = (State.READY, State.RETRIEVED)


@lru_cache(maxsize=16)
def ms(seconds: float) -> int:
    """Return milliseconds, at least 1. Cached: every sample asks for the same few settings."""
    return max(round(seconds * 1000), 1)


def log_entry(key: SampleKey, state: State, size_bytes: int, now_ms: int) -> bytes:
    """Return one entry of a completion log, as it is stored."""
    if state in _DELIVERABLE:
        return b"F %d %d %d" % (key.seq_id, size_bytes, now_ms)
    return b"X %d 0 %d" % (key.seq_id, now_ms)


def run_number(run_id: bytes) -> int:
    """Return the number that the epochs of a server's logs are mixed with; 0 if the server reports no run id."""
    return int(run_id[:5], 16) if _RUN_ID.match(run_id) else 0


def log_page(reply: Any, cursor: int, run: int = 0) -> LogPage:
    """Read the reply of `READ_LOG` for `cursor`, and mix its epoch with `run`. Unreadable lines are only counted."""
    if not reply:
        return LogPage([], 0)
    known, epoch, n, entries = reply
    if not entries:
        return LogPage([], cursor if known else 0)
    found = [_log_entry_of(entry) for entry in entries]
    readable = [entry for entry in found if entry is not None]
    # n counts from 1, so that cursor 0 means "from the start".
    return LogPage(readable, ((epoch ^ run) << SEQ_BITS) + n, len(found) - len(readable))


def _log_entry_of(data: bytes) -> LogEntry | None:
    try:
        kind, seq_id, size_bytes, _ = data.decode().split(" ")
        return LogEntry(int(seq_id), kind == _FINISHED, int(size_bytes))
    except ValueError:
        return None


def session_state(seen: bytes | None, finished: bytes | None) -> SessionState:
    """Return the state of a session with these two fields."""
    if finished:
        return SessionState.FINISHED
    return SessionState.ALIVE if seen else SessionState.UNKNOWN


def parse_info(data: bytes) -> dict[str, str]:
    """Return the values of INFO by name."""
    lines = (line.partition(":") for line in data.decode("utf-8", "replace").splitlines())
    return {name: value for name, colon, value in lines if colon}


def store_info(info: dict[str, str]) -> StoreInfo:
    """Return what `/status` and `gateway check` show of a server."""
    product = "Valkey" if "valkey_version" in info else "Redis"
    return StoreInfo(
        mode=info.get("server_mode", info.get("redis_mode", "standalone")),
        version=f"{product} {info.get('valkey_version', info.get('redis_version', '?'))}",
        used_bytes=_number(info, "used_memory"),
        max_bytes=_number(info, "maxmemory"),
        policy=info.get("maxmemory_policy", ""),
        received_bytes=_number(info, "total_net_input_bytes"),
        sent_bytes=_number(info, "total_net_output_bytes"),
        clock_us=_number(info, "server_time_usec"),
    )


def _number(info: dict[str, str], name: str) -> int:
    """Return a value of INFO as a number; 0 if the server does not report it."""
    text = info.get(name, "")
    return int(text) if _NUMBER.fullmatch(text) else 0


def check_version(info: dict[str, str], shown: str) -> None:
    """Raise `StoreRefused` if the server is too old for the scripts."""
    version = info.get("redis_version", "")
    numbers = tuple(int(part) for part in version.split(".")[:2] if _NUMBER.fullmatch(part))
    if "valkey_version" in info or numbers >= _OLDEST_REDIS:
        return
    raise StoreRefused(f"Redis at {shown} is version {version}; 7.0 or newer, or Valkey, is needed")
