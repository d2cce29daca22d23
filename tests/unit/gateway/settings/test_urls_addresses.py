from __future__ import annotations

import pytest

from gateway.settings.urls import MAX_ADDRESSES, is_loopback, parse_source_ips, url_host


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("10.0.0.1", ("10.0.0.1",)),
        (" 10.0.0.1 , 10.0.0.2 ", ("10.0.0.1", "10.0.0.2")),
        ("10.0.0.254-10.0.1.1", ("10.0.0.254", "10.0.0.255", "10.0.1.0", "10.0.1.1")),
        ("10.0.0.5-10.0.0.5", ("10.0.0.5",)),
        ("10.0.0.16/30", ("10.0.0.17", "10.0.0.18")),
        ("10.0.0.16/31", ("10.0.0.16", "10.0.0.17")),
        ("10.0.0.16/32", ("10.0.0.16",)),
        ("10.0.0.2,10.0.0.1-10.0.0.3", ("10.0.0.2", "10.0.0.1", "10.0.0.3")),
        ("fd00::1-fd00::2", ("fd00::1", "fd00::2")),
        ("", ()),
    ],
)
def test_lists_ranges_and_networks(text: str, addresses: tuple[str, ...]) -> None:
    assert parse_source_ips(text) == addresses


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("10.0.0.256", "'10.0.0.256' is not an IP address"),
        ("host", "'host' is not an IP address"),
        ("10.0.0.9-10.0.0.1", "does not run from a lower to a higher"),
        ("10.0.0.1-fd00::1", "does not run from a lower to a higher"),
        ("10.0.0.17/28", "is not a network"),
        ("10.0.0.0/8", f"more than {MAX_ADDRESSES} addresses"),
        ("::-ffff::", f"more than {MAX_ADDRESSES} addresses"),
        ("10.0.0.0/20,10.1.0.0/20", f"more than {MAX_ADDRESSES} addresses"),
        ("10.0.0.1,fd00::1", "cannot be mixed"),
    ],
)
def test_refusals_name_the_item(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_source_ips(text)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("example.org", False),
    ],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_url_host() -> None:
    assert (url_host("::1"), url_host("10.0.0.1")) == ("[::1]", "10.0.0.1")
