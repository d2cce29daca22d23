from __future__ import annotations

import pytest

from gateway.settings import urls
from shared.config import ModelName


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://10.0.0.5:8000", "http://10.0.0.5:8000"),
        ("http://10.0.0.5:8000/", "http://10.0.0.5:8000"),
        ("https://router.example/team/a/", "https://router.example/team/a"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_upstreams(text: str, url: str) -> None:
    assert urls.upstream_url(text) == url


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("10.0.0.5:8000", "base URL of a vLLM server"),
        ("ftp://host", "base URL of a vLLM server"),
        ("http://", "base URL of a vLLM server"),
        ("http://host:port", "base URL of a vLLM server"),
        ("http://host:99999", "base URL of a vLLM server"),
        ("http://ho st", "base URL of a vLLM server"),
        ("http://user:secret@host", "upstream-api-key-file"),
        ("http://host/?a=1", "no query"),
        ("http://host/#x", "no query"),
        ("http://host/v1", "without /v1"),
        ("http://host/prefix/v1/", "without /v1"),
    ],
)
def test_upstreams_that_are_none(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as refusal:
        urls.upstream_url(text)
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize(
    "text",
    [
        "redis://h:6379/0",
        "rediss://u:p@h",
        "unix:///run/redis.sock?db=1",
        "redis://[::1]",
        "redis+sentinel://u:p@a:1,b/name/2?sentinel_password=s",
        "redis+cluster://a:1,[::1]:2",
        "rediss+cluster://a",
    ],
)
def test_redis(text: str) -> None:
    assert urls.redis_url(text) == text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("http://h", "allowed are redis://"),
        ("redis://", "allowed are redis://"),
        ("unix://", "allowed are redis://"),
        ("redis://h:x", "allowed are redis://"),
        ("redis://:secret@h/x", "allowed are redis://"),
        ("redis+cluster://:secret@h/1", "allowed are redis://"),
        ("redis+sentinel://:secret@h,g", "allowed are redis://"),
        ("redis+cluster://h, g", "allowed are redis://"),
    ],
)
def test_redis_that_is_none(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as refusal:
        urls.redis_url(text)
    assert "secret" not in str(refusal.value)


def test_models() -> None:
    assert urls.model_name("org/m") == ModelName("org/m", "org/m")
    assert urls.model_name("org/m=/data/m") == ModelName("org/m", "/data/m")
    for wrong in ("", "=x", "x=", "a b"):
        with pytest.raises(ValueError, match="NAME or NAME=UPSTREAM_NAME"):
            urls.model_name(wrong)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:hunter2@h:6379/0", "redis://:***@h:6379/0"),
        ("redis://me:hunter2@h/0?x=1", "redis://me:***@h/0?x=1"),
        ("redis://h/0?password=hunter2&db=1", "redis://h/0?password=***&db=1"),
        ("redis://h@x:p@h2", "redis://h@x:***@h2"),
        ("unix:///run/r.sock", "unix:///run/r.sock"),
        ("redis://[hunter2", "(not a URL)"),
    ],
)
def test_passwords_are_not_shown(url: str, shown: str) -> None:
    assert urls.redacted(url) == shown
