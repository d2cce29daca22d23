"""Parsers for durations, sizes, counts, fractions, choices and switches as people write them. Pure.

A parser takes the text that was given and returns the value. It raises `ValueError` with what is allowed; its caller
adds the name of the flag.
"""

from __future__ import annotations

import math
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_SECONDS: Final = {"": 1.0, "s": 1.0, "ms": 0.001, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES: Final = {
    "": 1,
    "b": 1,
    "k": 1 << 10,
    "kib": 1 << 10,
    "m": 1 << 20,
    "mib": 1 << 20,
    "g": 1 << 30,
    "gib": 1 << 30,
    "t": 1 << 40,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_NUMBER_AND_UNIT: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\Z")
_TRUE: Final = frozenset({"true", "yes", "on", "1"})
_FALSE: Final = frozenset({"false", "no", "off", "0"})


def duration_s(at_least: float = 0.001, at_most: float = 30 * 86400.0) -> Callable[[str], float]:
    """Return a parser for seconds: `30`, `2.5`, `500ms`, `5m`, `1h`."""
    allowed = f"give seconds from {at_least:g} to {at_most:.0f} (30, 2.5, 500ms, 5m and 1h are understood)"

    def parse(text: str) -> float:
        seconds = _scaled(text, _SECONDS)
        if seconds is None or not at_least <= seconds <= at_most:
            raise ValueError(allowed)
        return seconds

    return parse


def size_bytes(at_least: int = 1) -> Callable[[str], int]:
    """Return a parser for bytes: `1048576`, `64MiB`, `1GiB`, `500MB`."""

    def parse(text: str) -> int:
        size = _scaled(text, _BYTES)
        if size is None or not at_least <= size <= 1 << 60:
            raise ValueError(f"give a size of at least {at_least} bytes, such as 64MiB or 1GiB")
        return int(size)

    return parse


def whole(at_least: int, at_most: int | None = None) -> Callable[[str], int]:
    """Return a parser for whole numbers of a range, of up to 18 digits if the range has no upper end."""
    allowed = f"give a whole number of at least {at_least}"
    if at_most is not None:
        allowed = f"give a whole number from {at_least} to {at_most}"

    def parse(text: str) -> int:
        if not re.fullmatch(r"-?\d{1,18}", text) or not at_least <= int(text) <= (at_most or 10**18):
            raise ValueError(allowed)
        return int(text)

    return parse


def fraction(text: str) -> float:
    """Parse a number from 0 to 1."""
    with suppress(ValueError):
        if 0 <= (number := float(text)) <= 1:
            return number
    raise ValueError("give a number from 0 to 1")


def choice(*words: str) -> Callable[[str], str]:
    """Return a parser for one of a few words; upper and lower case are the same."""

    def parse(text: str) -> str:
        if text.lower() not in words:
            raise ValueError(f"allowed are {', '.join(words)}")
        return text.lower()

    return parse


def switch(text: str) -> bool:
    """Parse `true`/`false`, `yes`/`no`, `on`/`off` or `1`/`0`."""
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueError("allowed are true and false")


def _scaled(text: str, units: dict[str, float] | dict[str, int]) -> float | None:
    match = _NUMBER_AND_UNIT.match(text.strip())
    factor = units.get(match[2].lower()) if match else None
    if match is None or factor is None:
        return None
    value = float(match[1]) * factor
    return value if math.isfinite(value) else None


def human_bytes(size: int) -> str:
    """Write a size for people: `1.5 GiB`."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
