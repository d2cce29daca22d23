"""Redis URLs in redis-py's forms."""

from __future__ import annotations

import ssl

import pytest

from shared.core.errors import ConfigError
from shared.redis.address import Address, ClusterAddress, RedisAddress, SentinelAddress, parse_url


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://", RedisAddress(host="localhost")),
        ("redis://h", RedisAddress(host="h")),
        ("redis://h:7/3", RedisAddress(host="h", port=7, db=3)),
        ("redis://h?db=4", RedisAddress(host="h", db=4)),
        ("redis://:p%40ss@h", RedisAddress(host="h", password="p@ss")),
        ("redis://u:p@[::1]:7", RedisAddress(host="::1", port=7, username="u", password="p")),
        ("rediss://h", RedisAddress(host="h", tls=True)),
        (
            "rediss://h?ssl_cert_reqs=none",
            RedisAddress(host="h", tls=True, tls_options=(("ssl_cert_reqs", "none"),)),
        ),
        ("unix:///run/r.sock", RedisAddress(path="/run/r.sock")),
        ("unix://u:p@/run/r.sock?db=2", RedisAddress(path="/run/r.sock", db=2, username="u", password="p")),
        (
            "redis+sentinel://u:p%2C%40@a:1,[::1],c/my%20master/3?sentinel_password=s",
            SentinelAddress(
                (
                    RedisAddress(host="a", port=1, password="s"),
                    RedisAddress(host="::1", port=26379, password="s"),
                    RedisAddress(host="c", port=26379, password="s"),
                ),
                "my master",
                RedisAddress(db=3, username="u", password="p,@"),
            ),
        ),
        (
            "rediss+sentinel://h/m",
            SentinelAddress((RedisAddress(host="h", port=26379, tls=True),), "m", RedisAddress(tls=True)),
        ),
        (
            "redis+cluster://:p@a,b:7",
            ClusterAddress((RedisAddress(host="a", password="p"), RedisAddress(host="b", port=7, password="p"))),
        ),
        ("rediss+cluster://a/0", ClusterAddress((RedisAddress(host="a", tls=True),))),
    ],
)
def test_addresses(url: str, address: Address) -> None:
    assert parse_url(url) == address


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "scheme"),
        ("http://h", "scheme 'http'"),
        ("redis://h:notaport", "not a URL"),
        ("redis://h/notadb", "must be a number"),
        ("unix://", "path of a socket"),
        ("redis+sentinel://h", "needs a service name"),
        ("redis+sentinel://h/name/x", "must be a number"),
        ("redis+sentinel://h,h:x/name", "not a URL"),
        ("redis+cluster://", "needs host"),
        ("redis+cluster://h,,g", "needs host"),
        ("redis+cluster://h/1", "no database but 0"),
    ],
)
def test_what_is_wrong_is_named_and_no_password_is_repeated(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_url(url)
    with pytest.raises(ConfigError) as caught:
        parse_url("http://user:hunter2@h")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis+sentinel://u:hunter2@a,b:1/m?sentinel_password=hunter2", "redis+sentinel://a:26379,b:1/m"),
        ("redis+cluster://u:hunter2@a,b:1", "redis+cluster://a:6379,b:1"),
    ],
)
def test_several_hosts_are_shown_without_password(url: str, shown: str) -> None:
    address = parse_url(url)
    assert address.shown == shown
    assert "hunter2" not in repr(address)


def test_what_is_shown_has_no_password() -> None:
    address = parse_url("rediss://user:hunter2@h:1/2")
    assert address.shown == "rediss://h:1/2"
    assert "hunter2" not in repr(address)


def tls_of(url: str) -> ssl.SSLContext | None:
    address = parse_url(url)
    assert isinstance(address, RedisAddress)
    return address.ssl_context()


def test_tls_is_verified_unless_told_otherwise() -> None:
    strict = tls_of("rediss://h")
    lax = tls_of("rediss://h?ssl_cert_reqs=none")
    assert strict is not None
    assert lax is not None
    assert (strict.verify_mode, strict.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert (lax.verify_mode, lax.check_hostname) == (ssl.CERT_NONE, False)
    assert tls_of("redis://h") is None
    with pytest.raises(ConfigError, match="TLS file"):
        tls_of("rediss://h?ssl_ca_certs=/nowhere.pem")
