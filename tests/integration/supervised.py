"""`gateway serve` with fake workers and no Redis: the program that the supervisor's tests start as a process of its own.

It takes serve's flags. Owners that are reaped are written to the file named by SUPERVISED_REAPED, one a line.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from gateway import cli
from gateway import serve as server
from shared.log import configure_logging
from shared.store.base import StoreInfo

if TYPE_CHECKING:
    from collections.abc import Callable

    from shared.config import Settings

FAKE_WORKER = (sys.executable, str(Path(__file__).with_name("fake_worker.py")))


class NoBacking:
    description = "nothing"

    def __init__(self, settings: Settings, run_dir: Path) -> None:
        self.info: StoreInfo | None = StoreInfo("memory", "1", 10, 100, "noeviction")

    async def open(self) -> str:
        return "redis://nowhere"

    async def watch(self) -> None:
        await asyncio.Event().wait()

    async def reap(self, owner: str) -> int:
        if path := os.environ.get("SUPERVISED_REAPED"):
            with Path(path).open("a") as file:
                file.write(owner + "\n")
        return 1

    async def close(self) -> None:
        pass


def run(settings: Settings, reread: Callable[[], Settings]) -> int:
    configure_logging(settings.log_format, settings.log_level)
    return asyncio.run(server.serve(settings, reread, worker_command=FAKE_WORKER, make_backing=NoBacking))


if __name__ == "__main__":
    server.run = run
    cli.main()
