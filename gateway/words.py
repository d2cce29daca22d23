"""Values of single flags that are no quantities. Pure.

Every parser takes a string and raises `ValueError` whose text says what is allowed; who calls knows the flag's name.
"""

from __future__ import annotations

from gateway import quantities as q
from shared.core.upstream_protocol import ProtocolChoice


def text(given: str) -> str:
    if not given.strip():
        raise ValueError("give something that is not empty")
    return given


def key_prefix(text: str) -> str:
    # Braces would change which Cluster slot a key falls into, a colon separates the parts of a key.
    if not text or not all(character.isalnum() or character in "-_." for character in text):
        raise ValueError("use letters, digits, '-', '_' and '.'")
    return text


def max_connections(text: str) -> int | None:
    try:
        return None if text.lower() == "auto" else q.whole(0, 10_000_000)(text)
    except ValueError:
        raise ValueError("give auto, 0 (no limit) or a number of connections") from None


def upstream_protocol(text: str) -> ProtocolChoice:
    return ProtocolChoice(q.choice(*(choice.value for choice in ProtocolChoice))(text))


def session_poll(text: str) -> bool:
    return q.choice("auto", "off")(text) == "auto"
