"""Asks for one slow sample, waits until a line comes on standard input, cancels it, and asks for a second one.

In: `model`, `slow` and `quick` (requests). Out: `slow` and `quick` (outcomes), `warnings`.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from sdk_session import KeptWarnings, asked, failure, outcome, sampling_client, service, submit, told


async def cancelled(client: Any, request: dict[str, Any]) -> dict[str, Any]:
    future = submit(client, request)
    task = asyncio.ensure_future(asyncio.wrap_future(future if not hasattr(future, "future") else future.future()))
    await asyncio.to_thread(sys.stdin.readline)
    task.cancel()
    try:
        await task
    except asyncio.CancelledError as error:
        return failure(error)
    return {"result": "came before it was cancelled"}


def main() -> None:
    warnings = KeptWarnings()
    wanted = asked()
    with service() as service_client:
        client = sampling_client(service_client, **wanted["model"])
        slow = asyncio.run(cancelled(client, wanted["slow"]))
        quick = outcome(submit(client, wanted["quick"]))
    told(slow=slow, quick=quick, warnings=warnings.lines)


if __name__ == "__main__":
    main()
