"""`--source-ips`: single addresses, ranges and networks, comma separated, as one flat list. Pure."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Final

Address = IPv4Address | IPv6Address

# More source addresses than anybody has workers; a mistyped prefix length must not fill the memory.
MAX_ADDRESSES: Final = 4096


def parse_source_ips(text: str) -> tuple[str, ...]:
    """Every address that `text` names, in its order, once each.

    `10.0.0.1`, `10.0.0.10-10.0.0.25` (both ends included) and `10.0.0.16/28` (its host addresses) may be mixed, IPv4
    and IPv6 may not: a slot's address decides which upstreams it can reach. Raises `ValueError` with a reason.
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
        raise ValueError(f"{text!r} is not an IP address") from None


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
    """True for loopback literals and `localhost`; any other name could resolve to anything."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def url_host(host: str) -> str:
    """An IPv6 literal needs brackets in a URL."""
    return f"[{host}]" if ":" in host else host
