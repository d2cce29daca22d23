"""Redis URLs, in the forms of redis-py where it has one. Importing redis-py itself would cost a worker 140 ms of CPU.

    redis://[[user]:password@]host[:port][/db]      rediss:// the same over TLS
    unix://[[user]:password@]/path/to/socket[?db=N]
    redis+sentinel://[[user]:password@]host[:port][,host[:port]...]/service[/db]
    redis+cluster://[[user]:password@]host[:port][,host[:port]...]

rediss+sentinel:// and rediss+cluster:// are the same over TLS, also to the sentinels. User and password belong to the
servers that hold the data; those of the sentinels are `sentinel_username` and `sentinel_password` in the query.

TLS options in the query: ssl_cert_reqs (required, optional, none), ssl_ca_certs, ssl_certfile, ssl_keyfile,
ssl_check_hostname (true, false).
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from shared.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from urllib.parse import SplitResult

DEFAULT_PORT: Final = 6379
DEFAULT_SENTINEL_PORT: Final = 26379
_KNOWN: Final = "use redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://"
_TLS_OPTIONS: Final = ("ssl_cert_reqs", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname")


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """The address and login of one server. Exactly one of `path` and `host` is set."""

    host: str | None = None
    port: int = DEFAULT_PORT
    path: str | None = None
    db: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: bool = False
    tls_options: tuple[tuple[str, str], ...] = ()
    # Set if sentinels named the address: finding a replica there means that their answer was stale.
    must_be_master: bool = False

    @property
    def shown(self) -> str:
        """The URL without its password, for logs and messages."""
        if self.path is not None:
            return f"unix://{self.path}"
        return f"{'rediss' if self.tls else 'redis'}://{self.host}:{self.port}/{self.db}"

    async def locate(self) -> RedisAddress:
        """Return this address, as `link.Server` asks for."""
        return self

    def ssl_context(self) -> ssl.SSLContext | None:
        """Return the TLS settings, or None without TLS. Raises `ConfigError` if a certificate cannot be read."""
        if not self.tls:
            return None
        options = dict(self.tls_options)
        verify = options.get("ssl_cert_reqs", "required")
        try:
            context = ssl.create_default_context(cafile=options.get("ssl_ca_certs"))
            if "ssl_certfile" in options:
                context.load_cert_chain(options["ssl_certfile"], options.get("ssl_keyfile"))
        except OSError as error:
            raise ConfigError(f"--redis-url: a TLS file cannot be used: {error}") from None
        if verify == "none" or options.get("ssl_check_hostname", "true").lower() in ("false", "0", "no"):
            context.check_hostname = False
        if verify == "none":
            context.verify_mode = ssl.CERT_NONE
        return context


@dataclass(frozen=True, slots=True)
class SentinelAddress:
    """A master that sentinels know by the name `service`. `server` holds its login and database, but not its host."""

    sentinels: tuple[RedisAddress, ...]
    service: str
    server: RedisAddress

    @property
    def shown(self) -> str:
        hosts = ",".join(f"{sentinel.host}:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{hosts}/{self.service}"


@dataclass(frozen=True, slots=True)
class ClusterAddress:
    """Some nodes of a cluster; any of them leads to the others."""

    seeds: tuple[RedisAddress, ...]

    @property
    def shown(self) -> str:
        return "redis+cluster://" + ",".join(f"{seed.host}:{seed.port}" for seed in self.seeds)

    def node(self, host: str, port: int) -> RedisAddress:
        """Return the address of another node, with the same login."""
        return replace(self.seeds[0], host=host, port=port)


Address = RedisAddress | SentinelAddress | ClusterAddress


def parse_url(url: str) -> Address:
    """Return the address in `url`. Raises `ConfigError`, whose text never repeats the URL: it may hold a password."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ConfigError(f"--redis-url is not a URL: {error}") from None
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    match parts.scheme:
        case "redis" | "rediss":
            return _tcp(parts, query)
        case "unix":
            return _unix(parts, query)
        case "redis+sentinel" | "rediss+sentinel":
            return _sentinel(parts, query)
        case "redis+cluster" | "rediss+cluster":
            return _cluster(parts, query)
    raise ConfigError(f"--redis-url: the scheme {parts.scheme!r} is not known; {_KNOWN}")


def _tcp(parts: SplitResult, query: Mapping[str, str]) -> RedisAddress:
    path = parts.path.strip("/")
    try:
        host, port = parts.hostname or "localhost", parts.port or DEFAULT_PORT
    except ValueError as error:
        raise ConfigError(f"--redis-url is not a URL: {error}") from None
    return replace(_server(parts, query), host=host, port=port, db=_db(path or query.get("db", "0")))


def _unix(parts: SplitResult, query: Mapping[str, str]) -> RedisAddress:
    if not parts.path:
        raise ConfigError("--redis-url: unix:// needs the path of a socket, as in unix:///run/redis.sock")
    return RedisAddress(
        path=unquote(parts.path),
        db=_db(query.get("db", "0")),
        username=_decoded(parts.username),
        password=_decoded(parts.password),
    )


def _sentinel(parts: SplitResult, query: Mapping[str, str]) -> SentinelAddress:
    service, _, db = parts.path.strip("/").partition("/")
    if not service:
        raise ConfigError(
            "--redis-url: redis+sentinel:// needs a service name, as in redis+sentinel://host:26379/mymaster"
        )
    server = replace(_server(parts, query), db=_db(db or query.get("db", "0")))
    sentinel = replace(
        server,
        db=0,
        username=query.get("sentinel_username") or None,
        password=query.get("sentinel_password") or None,
    )
    return SentinelAddress(_hosts(parts, sentinel, DEFAULT_SENTINEL_PORT), unquote(service), server)


def _cluster(parts: SplitResult, query: Mapping[str, str]) -> ClusterAddress:
    if parts.path.strip("/") not in ("", "0") or query.get("db", "0") != "0":
        raise ConfigError("--redis-url: redis+cluster:// has no database but 0; leave it out")
    return ClusterAddress(_hosts(parts, _server(parts, query), DEFAULT_PORT))


def _server(parts: SplitResult, query: Mapping[str, str]) -> RedisAddress:
    """Return the login and the TLS options, without a host. With several hosts `SplitResult` reads up to the last @."""
    return RedisAddress(
        username=_decoded(parts.username),
        password=_decoded(parts.password),
        tls=parts.scheme.startswith("rediss"),
        tls_options=tuple((name, query[name]) for name in _TLS_OPTIONS if name in query),
    )


def _hosts(parts: SplitResult, server: RedisAddress, default_port: int) -> tuple[RedisAddress, ...]:
    found = []
    for text in parts.netloc.rpartition("@")[2].split(","):
        try:
            host = urlsplit(f"//{text}")
            name, port = host.hostname, host.port or default_port
        except ValueError as error:
            raise ConfigError(f"--redis-url is not a URL: {error}") from None
        if not name:
            raise ConfigError(f"--redis-url: {parts.scheme}:// needs host[:port], several with commas between them")
        found.append(replace(server, host=name, port=port))
    return tuple(found)


def _decoded(text: str | None) -> str | None:
    return unquote(text) if text else None


def _db(text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"--redis-url: the database must be a number, not {text!r}")
    return int(text)
