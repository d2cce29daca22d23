"""The worker's ways out, all from the slot's own source IP: the chosen client for samples, aiohttp for everything else.

Why the settings are as they are:

- The source address is bound with IP_BIND_ADDRESS_NO_PORT, so that the kernel picks the port at connect, per
  destination: 28,000 connections per (source IP, upstream) instead of per source IP. `local_addr` binds too early.
- Idle connections are closed before vLLM closes them (uvicorn's 5.0 s): a POST that meets a closing connection is lost.
- There is no total deadline: a generation may take half an hour. Waiting for a free connection is charged to nobody.
- No cookies, no proxies from the environment, no redirects, no decompression, no DNS of IP literals.
"""

from __future__ import annotations

import resource
import socket
import ssl
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from shared.core import ports
from shared.core.result import LARGEST_RESULT_BYTES
from shared.core.upstream_protocol import ClientChoice
from workers.upstream.client.aiohttp_client import AiohttpClient, GivenNames
from workers.upstream.client.aiohttp_connector import ExclusiveConnector
from workers.upstream.client.dial import Dialler
from workers.upstream.client.own import OwnClient

if TYPE_CHECKING:
    from aiohttp.connector import AddrInfoType

    from shared.config import Settings
    from workers.upstream.client.dial import Resolve
    from workers.upstream.client.port import UpstreamClient

# From linux/in.h; the socket module names it from Python 3.12 on.
_IP_BIND_ADDRESS_NO_PORT: Final = getattr(socket, "IP_BIND_ADDRESS_NO_PORT", 24)
# One for each upstream of a large installation; the reserve of ports has room for them.
_PROBES_AT_ONCE: Final = 64
_PORT_RANGE_FILE: Final = "/proc/sys/net/ipv4/ip_local_port_range"


class BoundSocketFactory:
    """Makes sockets that leave from `source_ip`. `connect` chooses the port."""

    def __init__(self, source_ip: str) -> None:
        self._source_ip = source_ip
        self._family = socket.AF_INET6 if ":" in source_ip else socket.AF_INET

    def __call__(self, address: AddrInfoType) -> socket.socket:
        made = unbound_socket(address)
        try:
            if made.family == self._family:
                made.setsockopt(socket.IPPROTO_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
                made.bind((self._source_ip, 0))
        except OSError:
            made.close()
            raise
        return made


def unbound_socket(address: AddrInfoType) -> socket.socket:
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setblocking(False)
    return made


def connection_limits(settings: Settings) -> tuple[int, int]:
    """Return how many connections this worker may have open, in total and to one upstream; 0 is no limit.

    The automatic values are what one source IP can really open: above them requests wait in the connector instead of
    failing with EADDRNOTAVAIL. Ports are per upstream: when one of two is down, the other has no more than before.
    """
    if settings.max_connections is not None:
        return settings.max_connections, 0
    # Several slots share an address when there are more of them than addresses.
    port_range, sharing = _ephemeral_range(), -(-settings.workers // (len(settings.source_ips) or 1))
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limited = open_files if open_files != resource.RLIM_INFINITY else None
    total = ports.connection_limit(port_range, len(settings.upstreams), sharing, limited)
    return total, ports.connection_limit(port_range, 1, sharing, limited)


def make_client(settings: Settings, source_ip: str | None, resolve: Resolve | None = None) -> UpstreamClient:
    """Make the client for samples that was chosen. `resolve` replaces the system's name service."""
    total, to_one = connection_limits(settings)
    # Takes 35 ms of CPU, which a starting worker cannot spare and only https needs.
    tls = cache(ssl.create_default_context)
    attempt_timeout_s = settings.longest_attempt_s
    if settings.upstream_client is ClientChoice.AIOHTTP:
        connector = _pooled(settings, source_ip, total, to_one, resolver=GivenNames(resolve) if resolve else None)
        return AiohttpClient(connector, _timeouts(settings), tls, attempt_timeout_s, LARGEST_RESULT_BYTES)
    dialler = Dialler(
        BoundSocketFactory(source_ip) if source_ip is not None else unbound_socket,
        _family(source_ip),
        settings.connect_timeout_s,
        tls,
        resolve,
    )
    return OwnClient(
        dialler,
        limit=total,
        limit_per_origin=to_one,
        keep_alive_s=settings.upstream_keep_alive_s,
        read_timeout_s=settings.read_timeout_s,
        attempt_timeout_s=attempt_timeout_s,
        largest_reply_bytes=LARGEST_RESULT_BYTES,
    )


def make_session(settings: Settings, source_ip: str | None) -> aiohttp.ClientSession:
    """Make the session for what is passed through to the upstreams."""
    return _session(settings, _pooled(settings, source_ip, *connection_limits(settings)))


def make_training_session(settings: Settings, source_ip: str | None) -> aiohttp.ClientSession:
    """Make the session for the training server, which has ports of its own and gets no key of vLLM's."""
    _, to_one = connection_limits(settings)
    return _session(settings, _pooled(settings, source_ip, to_one, 0), with_key=False)


def make_probe_session(settings: Settings, source_ip: str | None) -> aiohttp.ClientSession:
    """Make the session for questions about an upstream.

    It is not the samples' one, so that a question does not wait behind ten thousand of them, and it opens a new
    connection each time, since a probe asks whether the upstream accepts one.
    """
    return _session(settings, _connector(source_ip, limit=_PROBES_AT_ONCE, force_close=True))


def _pooled(
    settings: Settings, source_ip: str | None, total: int, to_one: int, resolver: GivenNames | None = None
) -> ExclusiveConnector:
    keep_alive_s = settings.upstream_keep_alive_s
    return _connector(source_ip, limit=total, limit_per_host=to_one, keepalive_timeout=keep_alive_s, resolver=resolver)


def _connector(source_ip: str | None, **options: Any) -> ExclusiveConnector:
    return ExclusiveConnector(
        happy_eyeballs_delay=None,
        ttl_dns_cache=30,
        socket_factory=BoundSocketFactory(source_ip) if source_ip is not None else None,
        family=_family(source_ip),
        **options,
    )


def _session(settings: Settings, connector: aiohttp.TCPConnector, *, with_key: bool = True) -> aiohttp.ClientSession:
    key = settings.upstream_api_key if with_key else None
    headers = {"Authorization": f"Bearer {key}"} if key else None
    return aiohttp.ClientSession(
        connector=connector,
        headers=headers,
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        timeout=_timeouts(settings),
        trust_env=False,
        requote_redirect_url=False,
    )


def _timeouts(settings: Settings) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=None, sock_connect=settings.connect_timeout_s, sock_read=settings.read_timeout_s)


def _family(source_ip: str | None) -> socket.AddressFamily:
    # An IPv4 source cannot reach an IPv6 address of the same upstream, nor the other way round.
    if source_ip is None:
        return socket.AF_UNSPEC
    return socket.AF_INET6 if ":" in source_ip else socket.AF_INET


def _ephemeral_range() -> tuple[int, int]:
    try:
        with open(_PORT_RANGE_FILE) as file:
            low, high = file.read().split()
    except (OSError, ValueError):
        return ports.DEFAULT_RANGE
    return int(low), int(high)
