"""Redis URLs in redis-py's forms."""

from __future__ import annotations

import ssl

import pytest

from shared.core.errors import ConfigError
from shared.store.url import RedisAddress, parse_url


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
    ],
)
def test_addresses(url: str, address: RedisAddress) -> None:
    assert parse_url(url) == address


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "scheme"),
        ("http://h", "scheme 'http'"),
        ("redis://h:notaport", "not a URL"),
        ("redis://h/notadb", "must be a number"),
        ("unix://", "path of a socket"),
        ("redis+sentinel://h", "not supported by this version"),
        ("redis+cluster://h", "not supported by this version"),
    ],
)
def test_what_is_wrong_is_named_and_no_password_is_repeated(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_url(url)
    with pytest.raises(ConfigError) as caught:
        parse_url("http://user:hunter2@h")
    assert "hunter2" not in str(caught.value)


def test_what_is_shown_has_no_password() -> None:
    address = parse_url("rediss://user:hunter2@h:1/2")
    assert address.shown == "rediss://h:1/2"
    assert "hunter2" not in repr(address)


def test_tls_is_verified_unless_told_otherwise() -> None:
    strict = parse_url("rediss://h").ssl_context()
    lax = parse_url("rediss://h?ssl_cert_reqs=none").ssl_context()
    assert strict is not None
    assert lax is not None
    assert (strict.verify_mode, strict.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert (lax.verify_mode, lax.check_hostname) == (ssl.CERT_NONE, False)
    assert parse_url("redis://h").ssl_context() is None
    with pytest.raises(ConfigError, match="TLS file"):
        parse_url("rediss://h?ssl_ca_certs=/nowhere.pem").ssl_context()
