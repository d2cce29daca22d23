"""What a flag of `gateway serve` is, and the parsers for values that are not quantities. Pure.

A parser takes the text that was given and returns the value. It raises `ValueError` with what is allowed; its caller
adds the name of the flag. The flags themselves are in `table.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gateway.settings import quantities
from shared.core.upstream_protocol import ClientChoice, ProtocolChoice

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Flag:
    """A row of the table. `default` is the text shown in the help; the default values are in `Settings`."""

    section: str
    name: str
    parse: Callable[[str], Any]
    metavar: str
    help: str
    default: str = "none"
    repeatable: bool = False
    is_switch: bool = False

    @property
    def key(self) -> str:
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        return "GATEWAY_" + self.key.upper()


def switch(section: str, name: str, help_: str, default: str = "off") -> Flag:
    """Return a flag that is either on (`--NAME`) or off (`--no-NAME`)."""
    return Flag(section, name, quantities.switch, "", help_, default, is_switch=True)


def text(given: str) -> str:
    if not given.strip():
        raise ValueError("give something that is not empty")
    return given


def key_prefix(given: str) -> str:
    # Braces would change the slot of a key in Redis Cluster; a colon separates the parts of a key.
    if not given or not all(character.isalnum() or character in "-_." for character in given):
        raise ValueError("use letters, digits, '-', '_' and '.'")
    return given


def max_connections(given: str) -> int | None:
    try:
        return None if given.lower() == "auto" else quantities.whole(0, 10_000_000)(given)
    except ValueError:
        raise ValueError("give auto, 0 (no limit) or a number of connections") from None


def upstream_protocol(given: str) -> ProtocolChoice:
    return ProtocolChoice(quantities.choice(*(choice.value for choice in ProtocolChoice))(given))


def upstream_client(given: str) -> ClientChoice:
    return ClientChoice(quantities.choice(*(choice.value for choice in ClientChoice))(given))


def session_poll(given: str) -> bool:
    return quantities.choice("auto", "off")(given) == "auto"
