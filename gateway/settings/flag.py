"""Values of single flags that are no quantities. Pure.

Every parser takes a string and raises `ValueError` whose text says what is allowed; who calls knows the flag's name.

What is known of one thing that `gateway serve` can be told; the table of all is in `flags.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gateway.settings import quantities as q
from shared.core.upstream_protocol import ProtocolChoice

if TYPE_CHECKING:
    from collections.abc import Callable


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


@dataclass(frozen=True, slots=True)
class Flag:
    """`parse` raises `ValueError` with what is allowed. `default` is shown to people; the values live in `Settings`."""

    name: str
    parse: Callable[[str], Any]
    metavar: str
    default: str
    help: str
    section: str
    repeatable: bool = False
    is_switch: bool = False

    @property
    def key(self) -> str:
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        return "GATEWAY_" + self.key.upper()


def single(section: str, name: str, parse: Callable[[str], Any], metavar: str, default: str, help_: str) -> Flag:
    return Flag(name, parse, metavar, default, help_, section)


def switch(section: str, name: str, help_: str, default: str = "off") -> Flag:
    return Flag(name, q.switch, "", default, help_, section, is_switch=True)


def repeatable(section: str, name: str, parse: Callable[[str], Any], metavar: str, default: str, help_: str) -> Flag:
    return Flag(name, parse, metavar, default, help_, section, repeatable=True)
