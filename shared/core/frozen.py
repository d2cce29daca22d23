"""Values: immutable, compared by their fields, cheap to make, and safe to log. And things, which change.

A sample makes a dozen of them. A frozen dataclass sets each field through `object.__setattr__`, which takes four to ten
times as long as a msgspec struct does.
"""

from __future__ import annotations

import msgspec


class Frozen(msgspec.Struct, frozen=True):
    """The `repr` leaves out what is bytes: prompts, tokens, results and bodies are nobody's to read in a log."""

    def __repr__(self) -> str:
        told = ((name, getattr(self, name)) for name in self.__struct_fields__)
        shown = ", ".join(f"{name}={value!r}" for name, value in told if not isinstance(value, bytes | memoryview))
        return f"{type(self).__name__}({shown})"


class Changing(msgspec.Struct, eq=False):
    """What has a state, and is itself whatever that is: made in a fifth of a dataclass' time."""
