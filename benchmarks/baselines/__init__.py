"""The baselines: the usual way to do each step with a well-known library."""

from __future__ import annotations

from importlib.util import find_spec


def notes_on_missing(part: str, package: str) -> list[str]:
    """Return a sentence if the package for the baseline of `part` is not installed."""
    if find_spec(package) is not None:
        return []
    return [f"{part}: no baseline, since {package} is not installed; the extra `bench` installs it"]
