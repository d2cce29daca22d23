"""Port arithmetic."""

from __future__ import annotations

import pytest

from shared.core.ports import DEFAULT_RANGE, connection_limit


@pytest.mark.parametrize(
    ("port_range", "upstreams", "sharing", "limit"),
    [
        (DEFAULT_RANGE, 1, 1, 25408),
        (DEFAULT_RANGE, 4, 1, 4 * 25408),
        (DEFAULT_RANGE, 1, 2, 12704),
        ((40000, 40063), 1, 1, 57),
        ((5, 4), 0, 0, 1),
    ],
)
def test_connection_limit(port_range: tuple[int, int], upstreams: int, sharing: int, limit: int) -> None:
    """B5: what a source IP can really open, less a reserve, times the upstream addresses."""
    assert connection_limit(port_range, upstreams, sharing) == limit


@pytest.mark.parametrize(("open_files", "limit"), [(None, 25408), (1_000_000, 25408), (20_000, 10_000), (1, 1)])
def test_descriptors_are_shared_with_the_clients(open_files: int | None, limit: int) -> None:
    """What cannot be opened waits in the connector: it must not take the descriptors that accepting needs."""
    assert connection_limit(DEFAULT_RANGE, 1, 1, open_files) == limit
