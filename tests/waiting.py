"""Waiting for what other tasks and processes bring about: for how long at the most, and what was seen last."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

# No measure of anything: reached only by what never comes, however busy the machine is.
DEADLINE_S: Final = 60.0
_LOOK_S: Final = 0.02
_TURN_S: Final = 0.001
_SHOWN_CHARS: Final = 2_000

T = TypeVar("T")


def eventually(
    look: Callable[[], T | None],
    what: str,
    deadline_s: float = DEADLINE_S,
    *,
    until: Callable[[Any], object] = bool,
) -> T:
    """The first value of `look` that `until` takes, which is any that is true. Raises with the last one otherwise."""
    end_s = time.monotonic() + deadline_s
    while not until(seen := look()):
        if time.monotonic() > end_s:
            raise AssertionError(_never(what, deadline_s, seen))
        time.sleep(_LOOK_S)
    return seen  # type: ignore[return-value] # `until` has taken it


async def until(condition: Callable[[], Any], what: str = "what is waited for", deadline_s: float = DEADLINE_S) -> None:
    """The same for what other tasks of this loop bring about."""
    end_s = time.monotonic() + deadline_s
    while not (seen := condition()):
        assert time.monotonic() < end_s, _never(what, deadline_s, seen)
        await asyncio.sleep(_TURN_S)


def _never(what: str, deadline_s: float, seen: object) -> str:
    return f"not after {deadline_s:g} s: {what}; last seen: {str(seen)[:_SHOWN_CHARS]}"
