"""Parsers of flags that name addresses, URLs and models, and how a URL is shown without its password. Pure."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Final
from urllib.parse import SplitResult, urlsplit, urlunsplit

from shared.config import ImageToken, ModelName
from shared.core.errors import ConfigError
from shared.redis.address import RedisAddress, parse_url

Address = IPv4Address | IPv6Address

# More addresses than anybody has workers; without a limit a mistyped prefix length would fill the memory.
MAX_ADDRESSES: Final = 4096


def parse_source_ips(text: str) -> tuple[str, ...]:
    """Return every address that `--source-ips` names, in the given order and without duplicates.

    `10.0.0.1`, `10.0.0.10-10.0.0.25` (both ends included) and `10.0.0.16/28` (its host addresses) may be mixed. IPv4
    and IPv6 may not: the address of a slot decides which upstreams the slot can reach. Raises `ValueError`.
    """
    found: dict[Address, None] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        found.update(dict.fromkeys(_expand(item)))
        if len(found) > MAX_ADDRESSES:
            raise ValueError(f"{item!r} makes more than {MAX_ADDRESSES} addresses")
    if len({address.version for address in found}) > 1:
        raise ValueError("IPv4 and IPv6 addresses cannot be mixed")
    return tuple(str(address) for address in found)


def _expand(item: str) -> list[Address]:
    if "/" in item:
        return _network(item)
    first, dash, last = item.partition("-")
    return _range(item, first.strip(), last.strip()) if dash else [_address(item)]


def _address(text: str) -> Address:
    try:
        return ip_address(text)
    except ValueError:
        raise ValueError(
            f"{text!r} is not an IP address; give addresses, ranges (10.0.0.10-10.0.0.25) and networks (10.0.0.16/28)"
        ) from None


def _range(item: str, first: str, last: str) -> list[Address]:
    low, high = _address(first), _address(last)
    if low.version != high.version or int(low) > int(high):
        raise ValueError(f"{item!r} does not run from a lower to a higher address")
    if int(high) - int(low) >= MAX_ADDRESSES:
        raise ValueError(f"{item!r} makes more than {MAX_ADDRESSES} addresses")
    return [type(low)(number) for number in range(int(low), int(high) + 1)]


def _network(item: str) -> list[Address]:
    try:
        network = ip_network(item)
    except ValueError as error:
        raise ValueError(f"{item!r} is not a network ({error})") from None
    if network.num_addresses > MAX_ADDRESSES:
        raise ValueError(f"{item!r} makes more than {MAX_ADDRESSES} addresses")
    return list(network.hosts())


def is_loopback(host: str) -> bool:
    """Return True for loopback literals and `localhost`. Any other name could resolve to anything."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def url_host(host: str) -> str:
    """Return `host` as a URL needs it: an IPv6 literal goes in brackets."""
    return f"[{host}]" if ":" in host else host


_REDIS_FORMS: Final = (
    "allowed are redis://HOST:PORT/DB, rediss://HOST:PORT/DB, unix:///PATH?db=DB,"
    " redis+sentinel://HOST:PORT,HOST:PORT/SERVICE/DB and redis+cluster://HOST:PORT,HOST:PORT"
)


def upstream_url(text: str) -> str:
    """Return the base URL of an upstream without its trailing slash. Raises `ValueError`.

    A path prefix is kept, for routers that have one.
    """
    allowed = "give the base URL of a vLLM server or router, such as http://10.0.0.5:8000"
    # OpenAI clients are configured with /v1; here it would turn every request into a 404.
    return _base_url(text, allowed, key_flag="--upstream-api-key-file", added="/v1")


def training_url(text: str) -> str:
    """Return the base URL of a training server, as SDK users set it. Raises `ValueError`."""
    allowed = "give the base URL of a Tinker training server, such as http://10.0.0.6:8000"
    return _base_url(text, allowed, key_flag="--training-api-key-file", added="/api/v1")


def collector_url(text: str) -> str:
    """Return the base URL of an OpenTelemetry collector. Raises `ValueError`."""
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
    """Return True if a resolver accepts the name. A label of 64 characters, for one, makes the lookup itself raise."""
    try:
        name.encode("idna")
    except UnicodeError:
        return False
    return bool(name) and name.isprintable() and " " not in name


def redis_url(text: str) -> str:
    """Return the URL if it is a Redis address. Raises `ValueError`, without the URL: it may hold a password."""
    if any(character.isspace() for character in text):
        raise ValueError(_REDIS_FORMS)
    try:
        address = parse_url(text)
    except ConfigError:
        raise ValueError(_REDIS_FORMS) from None
    # Redis' own tools read a missing host as localhost. Here an empty variable is the more likely cause.
    if isinstance(address, RedisAddress) and address.path is None and not urlsplit(text).hostname:
        raise ValueError(_REDIS_FORMS)
    return text


def model_name(text: str) -> ModelName:
    """Parse `NAME` or `NAME=UPSTREAM_NAME`."""
    name, equals, upstream = text.partition("=")
    if not name or (equals and not upstream) or any(c.isspace() for c in text):
        raise ValueError("give NAME or NAME=UPSTREAM_NAME, without spaces")
    return ModelName(name, upstream or name)


def image_token(text: str) -> ImageToken:
    """Parse `NAME=ID`: a base model as clients know it, and the id of its image token."""
    name, _, number = text.rpartition("=")
    if not name or any(c.isspace() for c in name) or not (number.isascii() and number.isdecimal() and len(number) < 10):
        raise ValueError("give NAME=ID, the name of a model and the id of a token")
    return ImageToken(name, int(number))


def redacted(url: str) -> str:
    """Return the URL with its password replaced by `***`, in the user part and in query parameters."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "(not a URL)"
    query = "&".join(_redacted_parameter(item) for item in parts.query.split("&")) if parts.query else ""
    userinfo, at, host = parts.netloc.rpartition("@")
    if at and ":" in userinfo:
        userinfo = userinfo.partition(":")[0] + ":***"
    # `urlunsplit` would drop the slashes of unix:///path.
    return f"{parts.scheme}://{userinfo}{at}{host}{parts.path}" + (f"?{query}" if query else "")


def _redacted_parameter(item: str) -> str:
    name, equals, _ = item.partition("=")
    return f"{name}=***" if equals and "password" in name.lower() else item


def _split(text: str, allowed: str) -> SplitResult:
    try:
        parts = urlsplit(text)
        _ = parts.port  # the standard library checks the port only when it is read
    except ValueError:
        raise ValueError(allowed) from None
    if any(character.isspace() for character in text):
        raise ValueError(allowed)
    return parts
