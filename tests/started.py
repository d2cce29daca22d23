"""The processes that tests have started and what they wrote, to be shown under a test that failed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator


class Started(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def running(self) -> bool: ...

    @property
    def log(self) -> str:
        """The end of what it wrote."""
        ...


_started: list[Started] = []


def remember(process: Started) -> None:
    _started.append(process)


def forget_ended() -> None:
    """Before a test: what has ended until then belongs to others."""
    _started[:] = [process for process in _started if process.running]


def logs() -> Iterator[tuple[str, str]]:
    """Of what runs, and of what has ended since the test began."""
    for process in _started:
        yield process.name, process.log
