"""`gateway serve` with fake workers and no Redis, started as a process of its own by the supervisor's tests.

It takes the flags of serve, and logs which owners it reaps.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from gateway import cli
from gateway import serve as server
from gateway.supervision.fleet_model import USUAL_PACE, Pace
from shared.log import configure_logging
from shared.store.contract import StoreInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shared.config import Settings

log = logging.getLogger("supervised")

FAKE_WORKER = (sys.executable, str(Path(__file__).with_name("fake_worker.py")))


class NoBacking:
    description = "nothing"

    def __init__(self, settings: Settings, run_dir: Path) -> None:
        self.published: Sequence[str] = ()
        self.info: StoreInfo | None = StoreInfo("memory", "1", 10, 100, "noeviction")
        self.lag_ms = 0.0

    async def open(self) -> str:
        return "redis://nowhere"

    async def watch(self) -> None:
        await asyncio.Event().wait()

    async def upstream_list(self, wanted: Sequence[str] | None) -> Sequence[str]:
        if wanted is not None:
            self.published = wanted
        return self.published

    async def reap(self, owner: str) -> int:
        log.info("reaped", extra={"owner": owner})
        return 1

    async def close(self) -> None:
        pass


def run(settings: Settings, reread: Callable[[], Settings], doubts: Sequence[str] = ()) -> int:
    configure_logging(settings.log_format, settings.log_level)
    # Short only where a test is about silence: on a busy machine a healthy worker can be silent for a while.
    hung_after_s = float(os.environ.get("HUNG_AFTER_S", USUAL_PACE.hung_after_s))
    pace = Pace(hung_after_s, drain_grace_s=0.5)
    return asyncio.run(server.serve(settings, reread, FAKE_WORKER, NoBacking, pace))


if __name__ == "__main__":
    server.run = run
    cli.main()
