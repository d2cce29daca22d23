"""The names of everything in Redis, in one place.

Braces mark what decides the slot on a cluster: what belongs to a sampling session stands in one, what belongs to a
worker instance in another, and every sample wherever its whole name falls, so that payloads spread over all shards.

How the store's small things look in Redis, apart from the sample's own record (`shared/core/record.py`). Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from shared.core import upstream_list
from shared.core.errors import StoreRefused
from shared.core.lifecycle import State
from shared.core.model import SampleKey
from shared.core.record import BadRecord, unpack, unpack_header
from shared.store.contract import LogEntry, LogPage, SessionState, StoreInfo

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from shared.core.record import Header, Record
    from shared.core.upstream_list import UpstreamList


@dataclass(frozen=True, slots=True)
class Keys:
    """All under one prefix, so that several gateways can share a server."""

    prefix: str

    @property
    def samples_prefix(self) -> str:
        """A sample's name is this and its `member`."""
        return f"{self.prefix}:s:"

    def sample(self, key: SampleKey) -> str:
        return f"{self.prefix}:s:{key.session_key}:{key.seq_id}"

    def samples(self, keys: Sequence[SampleKey]) -> list[str]:
        return [self.sample(key) for key in keys]

    def log(self, session_key: str, clone_id: int) -> str:
        return f"{self.prefix}:d:{{{session_key}}}:{clone_id}"

    def open_set(self, owner: str) -> str:
        return f"{self.prefix}:o:{{{owner}}}"

    def lease(self, owner: str) -> str:
        return f"{self.prefix}:e:{{{owner}}}"

    @property
    def instances(self) -> str:
        return f"{self.prefix}:w"

    @property
    def refills(self) -> str:
        return f"{self.prefix}:r"

    @property
    def roll(self) -> str:
        return f"{self.prefix}:t"

    def inbox(self, owner: str) -> str:
        return f"{self.prefix}:i:{{{owner}}}"

    def session(self, session_id: str) -> str:
        return f"{self.prefix}:n:{session_id}"

    def sessions_of(self, owner_tag: str) -> str:
        return f"{self.prefix}:m:{owner_tag}"

    def clones(self, session_key: str) -> str:
        return f"{self.prefix}:c:{{{session_key}}}"

    @property
    def upstreams(self) -> str:
        return f"{self.prefix}:u"

    def lock(self, name: str) -> str:
        return f"{self.prefix}:k:{name}"

    # -- channels

    @property
    def announcements(self) -> str:
        return f"{self.prefix}:a:"

    def announcement(self, session_key: str) -> str:
        return f"{self.announcements}{{{session_key}}}"

    def announced(self, channel: str) -> str:
        """The session key in a channel of announcements."""
        return channel[len(self.announcements) + 1 : -1]

    def control(self, owner: str) -> str:
        return f"{self.prefix}:x:{{{owner}}}"

    @property
    def control_all(self) -> str:
        return f"{self.prefix}:x"


def member(key: SampleKey) -> str:
    """A sample as it stands in its owner's open set."""
    return f"{key.session_key}:{key.seq_id}"


def key_of(text: str) -> SampleKey:
    session_key, _, seq_id = text.rpartition(":")
    return SampleKey(session_key, int(seq_id))


SEQ_BITS: Final = 32
# What `store_info` reads; all of INFO costs a server seven times as much.
INFO_SECTIONS: Final = ("server", "memory", "stats")
_OLDEST_REDIS: Final = (7, 0)
_NUMBER: Final = re.compile(r"[0-9]{1,19}")
_RUN_ID: Final = re.compile(rb"[0-9a-fA-F]{5}")
_FINISHED: Final = "F"
_DELIVERABLE: Final = (State.READY, State.RETRIEVED)


@lru_cache(maxsize=16)
def ms(seconds: float) -> int:
    """Remembered: each sample asks for the same few settings."""
    return max(round(seconds * 1000), 1)


def header_of(data: bytes) -> Header:
    """Raises `StoreRefused` for what no gateway wrote."""
    try:
        return unpack_header(data)
    except BadRecord as error:
        raise StoreRefused(str(error)) from error


def record_of(data: bytes | None) -> Record | None:
    """None for what is not there, or is empty. Raises `StoreRefused` for what no gateway wrote."""
    if not data:
        return None
    try:
        return unpack(data)
    except BadRecord as error:
        raise StoreRefused(str(error)) from error


def upstreams(data: bytes) -> UpstreamList:
    """Raises `StoreRefused` for what no gateway wrote."""
    try:
        return upstream_list.unpack(data)
    except ValueError as error:
        raise StoreRefused(str(error)) from error


def log_entry(key: SampleKey, state: State, size_bytes: int, now_ms: int) -> bytes:
    """One line of a completion log."""
    if state in _DELIVERABLE:
        return b"F %d %d %d" % (key.seq_id, size_bytes, now_ms)
    return b"X %d 0 %d" % (key.seq_id, now_ms)


def run_number(run_id: bytes) -> int:
    """What the epochs of a server's logs are mixed with; 0 for a server that does not tell its run id."""
    return int(run_id[:5], 16) if _RUN_ID.match(run_id) else 0


def log_page(reply: Any, cursor: int, run: int = 0) -> LogPage:
    """What `READ_LOG` found after `cursor`; `run`: what its epochs are not mixed with yet.

    Raises `StoreRefused` for what no gateway wrote.
    """
    if not reply:
        return LogPage([], 0)
    known, epoch, n, entries = reply
    if not entries:
        return LogPage([], cursor if known else 0)
    try:
        # n counts from 1, so that 0 means "from the start".
        return LogPage([_parse_entry(entry) for entry in entries], ((epoch ^ run) << SEQ_BITS) + n)
    except ValueError as error:
        raise StoreRefused("not a completion log") from error


def _parse_entry(data: bytes) -> LogEntry:
    kind, seq_id, size_bytes, _ = data.decode().split(" ")
    return LogEntry(int(seq_id), kind == _FINISHED, int(size_bytes))


def session_state(seen: bytes | None, finished: bytes | None) -> SessionState:
    if finished:
        return SessionState.FINISHED
    return SessionState.ALIVE if seen else SessionState.UNKNOWN


def parse_info(data: bytes) -> dict[str, str]:
    """INFO's lines by name."""
    lines = (line.partition(":") for line in data.decode("utf-8", "replace").splitlines())
    return {name: value for name, colon, value in lines if colon}


def store_info(info: dict[str, str]) -> StoreInfo:
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
    """A line of INFO; 0 where a server does not tell it."""
    text = info.get(name, "")
    return int(text) if _NUMBER.fullmatch(text) else 0


def check_version(info: dict[str, str], shown: str) -> None:
    """Raises `StoreRefused` for a server that lacks what the scripts use."""
    version = info.get("redis_version", "")
    if "valkey_version" in info or _version(version) >= _OLDEST_REDIS:
        return
    raise StoreRefused(f"Redis at {shown} is version {version}; 7.0 or newer, or Valkey, is needed")


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if _NUMBER.fullmatch(part))
