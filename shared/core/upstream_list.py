"""The list of upstreams that an operator published at run time, which all workers of all hosts use.

A version is a wall-clock time in milliseconds, raised where a clock lags behind: the higher of two versions is later.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from shared.core.errors import StoreRefused

# The message to all workers after a list was published.
PUBLISHED = b"upstreams"


@dataclass(frozen=True, slots=True)
class UpstreamList:
    """A published list of base URLs. An empty one hands the choice back to each host's own flags."""

    version: int
    urls: tuple[str, ...]


def pack(published: UpstreamList) -> bytes:
    """Return a list as it is stored."""
    return f"{published.version} {json.dumps(published.urls)}".encode()


def unpack(data: bytes) -> UpstreamList:
    """Return the list in a stored value. Raises `StoreRefused` if no gateway wrote it."""
    version, _, text = data.partition(b" ")
    try:
        number, urls = int(version), json.loads(text)
    except (ValueError, RecursionError):
        raise StoreRefused("not a list of upstreams") from None
    if not isinstance(urls, list) or not all(isinstance(url, str) for url in urls):
        raise StoreRefused("not a list of upstreams")
    return UpstreamList(number, tuple(urls))


def next_version(before: UpstreamList | None, now_ms: int) -> int:
    """Return a version above that of `before`, whichever host's clock made that one."""
    return max(now_ms, before.version + 1 if before is not None else 0)
