"""Make the store that a URL asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shared.redis.address import ClusterAddress, parse_url

if TYPE_CHECKING:
    from shared.clock import Clock
    from shared.store.contract import Store


# For those who look at a store without writing sessions.
_SESSION_TTL_S: Final = 3900.0


def make_store(
    url: str, key_prefix: str, *, clock: Clock | None = None, session_ttl_s: float = _SESSION_TTL_S
) -> Store:
    """Return a store that is not connected yet. Raises `ConfigError` for an invalid URL."""
    if isinstance(parse_url(url), ClusterAddress):
        from shared.store.cluster import ClusterStore

        return ClusterStore(url, key_prefix, clock=clock, session_ttl_s=session_ttl_s)
    from shared.store.one_server import RedisStore

    return RedisStore(url, key_prefix, clock=clock, session_ttl_s=session_ttl_s)
