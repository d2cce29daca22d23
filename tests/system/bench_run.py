"""The commands that need no gateway to be there, run as a person runs them."""

from __future__ import annotations

import asyncio
import sys


async def gateway(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )


async def finished(*arguments: str) -> tuple[int | None, str]:
    process = await gateway(*arguments)
    output, _ = await process.communicate()
    return process.returncode, output.decode()
