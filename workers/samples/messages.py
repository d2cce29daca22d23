"""The messages that workers leave for each other through the store."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from shared.core.model import SampleKey
from shared.core.upstream_list import PUBLISHED

_SEQ: Final = re.compile(r"[0-9]{1,19}")


@dataclass(frozen=True, slots=True)
class Cancel:
    """The client no longer wants this sample of yours."""

    key: SampleKey


@dataclass(frozen=True, slots=True)
class Finish:
    """This session was finished: end what you run of it."""

    session_id: str


@dataclass(frozen=True, slots=True)
class Upstreams:
    """A list of upstreams was published: read it."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The store has lost its data: enter again what you know, if it has forgotten you as well."""


@dataclass(frozen=True, slots=True)
class There:
    """That worker has entered all that it runs into the store."""

    owner: str


@dataclass(frozen=True, slots=True)
class Gone:
    """That worker no longer runs anything."""

    owner: str


def cancel_message(key: SampleKey) -> bytes:
    return f"cancel {key.session_key} {key.seq_id}".encode()


def finish_message(session_id: str) -> bytes:
    return f"finish {session_id}".encode()


LOST_MESSAGE: Final = b"lost"


def parse(message: bytes) -> Cancel | Finish | Lost | Upstreams | There | Gone | None:
    """Return the message, or None if it is unknown: another version may have sent it."""
    if message == PUBLISHED:
        return Upstreams()
    try:
        verb, *words = message.decode().split(" ")
    except UnicodeDecodeError:
        return None
    match verb, words:
        case "cancel", [session_key, seq_id] if _SEQ.fullmatch(seq_id):
            return Cancel(SampleKey(session_key, int(seq_id)))
        case "finish", [session_id]:
            return Finish(session_id)
        case "lost", []:
            return Lost()
        case "there", [owner]:
            return There(owner)
        case "gone", [owner]:
            return Gone(owner)
    return None
