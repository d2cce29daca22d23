"""Keep a client process in touch with its driver: read the plan, report progress, and end whatever happens.

This module needs only the standard library, since it also runs under the interpreter of an SDK.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.bench.load.tally import LoadTally

_PROGRESS_S: Final = 0.25
# A plan is a line of a few hundred bytes.
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
    """Wait for `run`; cancel it if the driver ends, or if no sample ends for `stuck_after_s`.

    Raises what `run` raised. A cancelled run still reports: the samples that are missing count as lost.
    """
    beside = [
        asyncio.create_task(_show_progress(tally, show)),
        asyncio.create_task(_cancel_at_end(lines, run)),
        asyncio.create_task(_cancel_when_stuck(tally, stuck_after_s, run)),
    ]
    await asyncio.wait([run])
    for task in beside:
        task.cancel()
    await asyncio.gather(*beside, return_exceptions=True)
    if not run.cancelled():
        run.result()


async def _show_progress(tally: LoadTally, show: Callable[[LoadTally], None]) -> None:
    while True:
        show(tally)
        await asyncio.sleep(_PROGRESS_S)


async def _cancel_at_end(lines: asyncio.StreamReader, run: asyncio.Task[None]) -> None:
    await lines.read()
    run.cancel()


async def _cancel_when_stuck(tally: LoadTally, after_s: float, run: asyncio.Task[None]) -> None:
    """Cancel a run without progress. The SDK would wait two hours, which is too long for a bench run."""
    ended = -1
    while tally.ended != ended:
        ended = tally.ended
        await asyncio.sleep(after_s)
    run.cancel()
