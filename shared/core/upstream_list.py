"""The upstreams as an operator published them at run time: what all workers of all hosts agree on.

Versions are wall-clock milliseconds, pushed up where a clock lags behind: of two lists the higher one is the later.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

# What is broadcast to the workers when a list was published.
PUBLISHED = b"upstreams"


@dataclass(frozen=True, slots=True)
class UpstreamList:
    """`urls`: base URLs; none at all hands the choice back to each host's own flags."""

    version: int
    urls: tuple[str, ...]


def pack(published: UpstreamList) -> bytes:
    return f"{published.version} {json.dumps(published.urls)}".encode()


def unpack(data: bytes) -> UpstreamList:
    """Raises `ValueError` for what is no list."""
    version, _, text = data.partition(b" ")
    try:
        urls = json.loads(text)
    except RecursionError:
        raise ValueError("a list of upstreams is flat") from None
    if not isinstance(urls, list) or not all(isinstance(url, str) for url in urls):
        raise ValueError("a list of upstreams is a list of URLs")
    return UpstreamList(int(version), tuple(urls))


def next_version(before: UpstreamList | None, now_ms: int) -> int:
    """A version above `before`, whichever host's clock made that one."""
    return max(now_ms, before.version + 1 if before is not None else 0)
