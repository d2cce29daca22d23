"""A client in a process of its own: `python -m benchmarks.load_process URL SESSION_ID REQUESTS IN_FLIGHT`.

Sends heartbeats over connections that are kept and closed as the SDK's. Exit code 1 when one is not answered with 200.
"""

from __future__ import annotations

import asyncio
import sys

import uvloop

from gateway.bench import sdk_requests
from gateway.bench.transport import ConnectionPool, parse_target


async def load(url: str, session_id: str, requests: int, in_flight: int) -> int:
    """How many were answered with 200."""
    target = parse_target(url)
    endpoint = sdk_requests.Endpoints(target, "tml-benchmark").heartbeat
    request = endpoint.request(sdk_requests.heartbeat_body(session_id))
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
    url, session_id, requests, in_flight = sys.argv[1:]
    return 0 if uvloop.run(load(url, session_id, int(requests), int(in_flight))) == int(requests) else 1


if __name__ == "__main__":
    sys.exit(main())
