"""How the store's small things look in Redis, apart from the sample's own record (`shared/core/record.py`). Pure."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from shared.core import upstream_list
from shared.core.lifecycle import State
from shared.core.record import BadRecord, unpack, unpack_header
from shared.store.base import LogEntry, LogPage, SessionState, StoreInfo, StoreRefused

if TYPE_CHECKING:
    from typing import Any

    from shared.core.model import SampleKey
    from shared.core.record import Header, Record
    from shared.core.upstream_list import UpstreamList

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
