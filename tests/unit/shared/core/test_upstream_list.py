"""The published list of upstreams, as it is kept."""

from __future__ import annotations

import pytest

from shared.core.errors import StoreRefused
from shared.core.upstream_list import UpstreamList, next_version, pack, unpack


@pytest.mark.parametrize("urls", [(), ("http://a",), ("http://a:1/x y", "https://[::1]:8000/ü")])
def test_a_list_comes_back_as_it_was(urls: tuple[str, ...]) -> None:
    published = UpstreamList(1_700_000_000_000, urls)
    assert unpack(pack(published)) == published


@pytest.mark.parametrize("data", [b"", b"1", b"x []", b"1 {}", b"1 [1]", b'1 ["\xff"]'])
def test_what_is_no_list_is_refused(data: bytes) -> None:
    with pytest.raises(StoreRefused, match="not a list of upstreams"):
        unpack(data)


def test_a_version_rises_even_where_the_clock_lags_behind() -> None:
    assert next_version(None, 10) == 10
    assert next_version(UpstreamList(5, ()), 10) == 10
    assert next_version(UpstreamList(99, ()), 10) == 100
