"""What the gateway is compared with: the usual way to do each part, written for the purpose."""

from __future__ import annotations

from importlib.util import find_spec


def notes_on_missing(part: str, package: str) -> list[str]:
    """A sentence when the baseline of `part` cannot be run; empty when it can."""
    if find_spec(package) is not None:
        return []
    return [f"{part}: no baseline, since {package} is not installed; the extra `bench` has it"]
