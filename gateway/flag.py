"""What is known of one thing that `gateway serve` can be told; the table of all is in `flags.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gateway import quantities as q

if TYPE_CHECKING:
    from collections.abc import Callable


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
