"""Keep a load client process in touch with its driver: read its plan, show progress, and end in any case.

Needs the standard library alone: it runs under an SDK's interpreter, too.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.bench.load.tally import LoadTally

_PROGRESS_S: Final = 0.25
# A plan is a line of some hundred bytes.
_LINE_BYTES: Final = 1024 * 1024


async def standard_input() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


async def until_done(
    run: asyncio.Task[None],
    tally: LoadTally,
    lines: asyncio.StreamReader,
    stuck_after_s: float,
    show: Callable[[LoadTally], None],
) -> None:
    """Returns when `run` has ended or was cut short: by the driver's end, or when nothing ends for `stuck_after_s`.

    Raises what `run` raised. A run that was cut short reports too: what is missing from it is lost.
    """
    beside = [
        asyncio.create_task(_progress(tally, show)),
        asyncio.create_task(_cancel_at_end(lines, run)),
        asyncio.create_task(_cancel_when_stuck(tally, stuck_after_s, run)),
    ]
    await asyncio.wait([run])
    for task in beside:
        task.cancel()
    await asyncio.gather(*beside, return_exceptions=True)
    if not run.cancelled():
        run.result()


async def _progress(tally: LoadTally, show: Callable[[LoadTally], None]) -> None:
    while True:
        show(tally)
        await asyncio.sleep(_PROGRESS_S)


async def _cancel_at_end(lines: asyncio.StreamReader, run: asyncio.Task[None]) -> None:
    await lines.read()
    run.cancel()


async def _cancel_when_stuck(tally: LoadTally, after_s: float, run: asyncio.Task[None]) -> None:
    """The SDK waits two hours without progress; a bench run must end in a shift."""
    ended = -1
    while tally.ended != ended:
        ended = tally.ended
        await asyncio.sleep(after_s)
    run.cancel()
