"""Live progress of a run: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

    from gateway.bench.load import messages

_LINE_EVERY_S: Final = 2.0


@contextmanager
def live_progress(console: Console, samples: int) -> Iterator[Callable[[messages.Progress], None]]:
    """Yields what is to be called with each new sum of the clients' progress."""
    if not console.is_terminal:
        yield LineProgress(console, samples, time.monotonic).show
        return
    columns = (
        TextColumn("[bold]samples"),
        BarColumn(bar_width=40),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("samples", total=samples, note="")
        yield lambda progress: bar.update(task, completed=_ended(progress), note=_note(progress))


class LineProgress:
    """At most one line every two seconds, and none that says the same as the last."""

    def __init__(self, console: Console, samples: int, monotonic_s: Callable[[], float]) -> None:
        self._console = console
        self._samples = samples
        self._monotonic_s = monotonic_s
        self._shown_s = monotonic_s()
        self._shown = ""

    def show(self, progress: messages.Progress) -> None:
        now_s = self._monotonic_s()
        line = f"{_ended(progress):,} of {self._samples:,} samples, {_note(progress)}"
        if now_s - self._shown_s < _LINE_EVERY_S or line == self._shown:
            return
        self._shown_s, self._shown = now_s, line
        self._console.print(line, highlight=False)


def _ended(progress: messages.Progress) -> int:
    return progress.completed + progress.failed + progress.cancelled


def _note(progress: messages.Progress) -> str:
    parts = [f"{progress.submitted - _ended(progress)} in flight" if progress.submitted > _ended(progress) else ""]
    parts += [f"{progress.failed} failed" if progress.failed else ""]
    parts += [f"{progress.wrong} wrong" if progress.wrong else ""]
    return ", ".join(part for part in parts if part) or "starting"
