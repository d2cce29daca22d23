"""What may stand in `--upstream`, `--redis-url` and `--model`, and how a URL is shown without its password. Pure."""

from __future__ import annotations

from typing import Final
from urllib.parse import SplitResult, urlsplit, urlunsplit

from shared.config import ImageToken, ModelName
from shared.core.errors import ConfigError
from shared.store.url import RedisAddress, parse_url

_REDIS_FORMS: Final = (
    "allowed are redis://HOST:PORT/DB, rediss://HOST:PORT/DB, unix:///PATH?db=DB,"
    " redis+sentinel://HOST:PORT,HOST:PORT/SERVICE/DB and redis+cluster://HOST:PORT,HOST:PORT"
)


def upstream_url(text: str) -> str:
    """A base URL without trailing slash; a path prefix stays, for a router that has one. Raises `ValueError`."""
    allowed = "give the base URL of a vLLM server or router, such as http://10.0.0.5:8000"
    # With /v1, as OpenAI clients are given it, every question would be answered with 404.
    return _base_url(text, allowed, key_flag="--upstream-api-key-file", added="/v1")


def training_url(text: str) -> str:
    """The base URL of a training server, as SDK users set it. Raises `ValueError`."""
    allowed = "give the base URL of a Tinker training server, such as http://10.0.0.6:8000"
    return _base_url(text, allowed, key_flag="--training-api-key-file", added="/api/v1")


def collector_url(text: str) -> str:
    """The base URL of an OpenTelemetry collector. Raises `ValueError`."""
    allowed = "give the base URL of an OpenTelemetry collector, such as http://127.0.0.1:4318"
    return _base_url(text, allowed, key_flag="the variable OTEL_EXPORTER_OTLP_HEADERS", added="/v1/traces")


def _base_url(text: str, allowed: str, *, key_flag: str, added: str) -> str:
    parts = _split(text, allowed)
    if parts.scheme not in ("http", "https") or not _may_be_host(parts.hostname or ""):
        raise ValueError(allowed)
    if parts.username is not None or parts.password is not None:
        raise ValueError(f"credentials do not belong in the URL; use {key_flag}")
    if parts.query or parts.fragment:
        raise ValueError("a base URL has no query and no fragment")
    path = parts.path.rstrip("/")
    if path.endswith(added):
        raise ValueError(f"give the base URL without {added}, which the gateway adds")
    return urlunsplit((parts.scheme, parts.netloc, path, "", ""))


def _may_be_host(name: str) -> bool:
    """Whether a name service can be asked for it: with a label of 64 characters, the asking itself breaks."""
    try:
        name.encode("idna")
    except UnicodeError:
        return False
    return bool(name) and name.isprintable() and " " not in name


def redis_url(text: str) -> str:
    """Raises `ValueError`; its text never repeats the URL, which may hold a password."""
    if any(character.isspace() for character in text):
        raise ValueError(_REDIS_FORMS)
    try:
        address = parse_url(text)
    except ConfigError:
        raise ValueError(_REDIS_FORMS) from None
    # Read as localhost by Redis' own tools; here it is more likely a variable that was empty.
    if isinstance(address, RedisAddress) and address.path is None and not urlsplit(text).hostname:
        raise ValueError(_REDIS_FORMS)
    return text


def model_name(text: str) -> ModelName:
    """`NAME` or `NAME=UPSTREAM_NAME`."""
    name, equals, upstream = text.partition("=")
    if not name or (equals and not upstream) or any(c.isspace() for c in text):
        raise ValueError("give NAME or NAME=UPSTREAM_NAME, without spaces")
    return ModelName(name, upstream or name)


def image_token(text: str) -> ImageToken:
    """`NAME=ID`, of a base model as clients know it."""
    name, _, number = text.rpartition("=")
    if not name or any(c.isspace() for c in name) or not (number.isascii() and number.isdecimal() and len(number) < 10):
        raise ValueError("give NAME=ID, a model's name and the number of a token")
    return ImageToken(name, int(number))


def redacted(url: str) -> str:
    """The URL with its password, if any, replaced by `***`, also one given as a query parameter."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "(not a URL)"
    query = "&".join(_redacted_parameter(item) for item in parts.query.split("&")) if parts.query else ""
    userinfo, at, host = parts.netloc.rpartition("@")
    if at and ":" in userinfo:
        userinfo = userinfo.partition(":")[0] + ":***"
    # Not `urlunsplit`: it drops the slashes of unix:///path.
    return f"{parts.scheme}://{userinfo}{at}{host}{parts.path}" + (f"?{query}" if query else "")


def _redacted_parameter(item: str) -> str:
    name, equals, _ = item.partition("=")
    return f"{name}=***" if equals and "password" in name.lower() else item


def _split(text: str, allowed: str) -> SplitResult:
    try:
        parts = urlsplit(text)
        _ = parts.port  # checked lazily by the standard library
    except ValueError:
        raise ValueError(allowed) from None
    if any(character.isspace() for character in text):
        raise ValueError(allowed)
    return parts
