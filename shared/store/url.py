"""Redis URLs, in redis-py's forms, without redis-py: a worker starts 140 ms of CPU sooner without it.

    redis://[[user]:password@]host[:port][/db]      rediss:// the same over TLS
    unix://[[user]:password@]/path/to/socket[?db=N]

TLS options of the query: ssl_cert_reqs (required, optional, none), ssl_ca_certs, ssl_certfile, ssl_keyfile,
ssl_check_hostname (true, false).
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from shared.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from urllib.parse import SplitResult

DEFAULT_PORT: Final = 6379
_LATER: Final = ("redis+sentinel", "redis+cluster")
_KNOWN: Final = "use redis://, rediss:// or unix://"
_TLS_OPTIONS: Final = ("ssl_cert_reqs", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname")


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """Where a server is and how to log in. Exactly one of `path` and `host` is set."""

    host: str | None = None
    port: int = DEFAULT_PORT
    path: str | None = None
    db: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: bool = False
    tls_options: tuple[tuple[str, str], ...] = ()

    @property
    def shown(self) -> str:
        """Without its password, for logs and messages."""
        if self.path is not None:
            return f"unix://{self.path}"
        return f"{'rediss' if self.tls else 'redis'}://{self.host}:{self.port}/{self.db}"

    def ssl_context(self) -> ssl.SSLContext | None:
        """Raises `ConfigError` when a certificate cannot be read."""
        return _ssl_context(dict(self.tls_options)) if self.tls else None


def parse_url(url: str) -> RedisAddress:
    """The address in `url`. Raises `ConfigError`, which never repeats the URL: it may hold a password."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"--redis-url is not a URL: {error}") from None
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    match parts.scheme:
        case "redis" | "rediss":
            return _tcp(parts, port, query)
        case "unix":
            return _unix(parts, query)
        case scheme if scheme in _LATER:
            raise ConfigError(
                f"--redis-url: {scheme}:// is not supported by this version yet; use redis://, rediss:// or unix://"
            )
    raise ConfigError(f"--redis-url: the scheme {parts.scheme!r} is not known; {_KNOWN}")


def _tcp(parts: SplitResult, port: int | None, query: Mapping[str, str]) -> RedisAddress:
    path = parts.path.strip("/")
    return RedisAddress(
        host=parts.hostname or "localhost",
        port=port or DEFAULT_PORT,
        db=_db(path or query.get("db", "0")),
        username=_decoded(parts.username),
        password=_decoded(parts.password),
        tls=parts.scheme == "rediss",
        tls_options=tuple((name, query[name]) for name in _TLS_OPTIONS if name in query),
    )


def _unix(parts: SplitResult, query: Mapping[str, str]) -> RedisAddress:
    if not parts.path:
        raise ConfigError("--redis-url: unix:// needs the path of a socket, as in unix:///run/redis.sock")
    return RedisAddress(
        path=unquote(parts.path),
        db=_db(query.get("db", "0")),
        username=_decoded(parts.username),
        password=_decoded(parts.password),
    )


def _decoded(text: str | None) -> str | None:
    return unquote(text) if text else None


def _db(text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"--redis-url: the database must be a number, not {text!r}")
    return int(text)


def _ssl_context(options: Mapping[str, str]) -> ssl.SSLContext:
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
