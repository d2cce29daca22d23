"""A client in a process of its own: `python -m benchmarks.load_process URL CALL ID REQUESTS IN_FLIGHT`.

It sends one of `CALLS` over connections that it keeps and closes as the SDK does: heartbeats of a session, or polls for
a sample whose result is ready. Exit code 1 if any answer is not a 200.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Final

import uvloop

from gateway.bench.load import requests as sdk_requests
from gateway.bench.load.transport import ConnectionPool, parse_address

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.bench.load.requests import RequestTemplate, RequestTemplates

HEARTBEAT: Final = "heartbeat"
POLL: Final = "poll"
# Each call by name: its path and the body for an id.
CALLS: Final[dict[str, Callable[[RequestTemplates, str], tuple[RequestTemplate, bytes]]]] = {
    HEARTBEAT: lambda to, session_id: (to.heartbeat, sdk_requests.heartbeat_body(session_id)),
    POLL: lambda to, request_id: (to.retrieve_future, sdk_requests.retrieve_future_body(request_id, False)),
}


async def load(url: str, call: str, of_id: str, requests: int, in_flight: int) -> int:
    """Send the requests and return how many were answered with 200."""
    target = parse_address(url)
    endpoint, body = CALLS[call](sdk_requests.RequestTemplates(target, "tml-benchmark"), of_id)
    request = endpoint.request(body)
    pool, left, good = ConnectionPool(target), iter(range(requests)), 0

    async def caller() -> None:
        nonlocal good
        for _ in left:
            reply = await pool.send(request, endpoint.read_timeout_s)
            good += reply.status == 200

    await asyncio.gather(*(caller() for _ in range(in_flight)))
    pool.close()
    return good


def main() -> int:
    url, call, of_id, requests, in_flight = sys.argv[1:]
    return 0 if uvloop.run(load(url, call, of_id, int(requests), int(in_flight))) == int(requests) else 1


if __name__ == "__main__":
    sys.exit(main())
