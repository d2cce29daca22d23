"""Saying a thing once in a while, however often it happens."""

from __future__ import annotations


class Damping:
    """At most one line per subject in `every_s`. The subjects are a bounded set."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._said: dict[str, tuple[float, int]] = {}

    def allow(self, subject: str, now_s: float) -> int | None:
        """How many were held back since the last line when this one may be said; None: hold it back, too."""
        said_s, held_back = self._said.get(subject, (float("-inf"), 0))
        if now_s - said_s < self._every_s:
            self._said[subject] = (said_s, held_back + 1)
            return None
        self._said[subject] = (now_s, 0)
        return held_back
