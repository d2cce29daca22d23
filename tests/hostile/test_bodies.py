"""Bodies that would hold up or fill a worker: each is refused, or its work is done in bounded slices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from shared.config import MIB
from tests.app_bench import API, opened

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.app_bench import AppBench

# The largest body of each path, as docs/interface.md states it.
SMALL: Final = (
    "/retrieve_future",
    "/client/config",
    "/client/dynamic_config",
    "/session_heartbeat",
    "/create_session",
    "/sessions/x/finish",
    "/create_sampling_session",
    "/join_sampling_session",
    "/cancel_future",
    "/weights_info",
)
LARGEST_BYTES: Final = dict.fromkeys(SMALL, 1 * MIB) | {"/retrieve_futures": 16 * MIB, "/telemetry": 16 * MIB}


@pytest.fixture
async def bench() -> AsyncIterator[AppBench]:
    async with opened() as made:
        yield made


@pytest.mark.parametrize("path", LARGEST_BYTES)
async def test_a_path_takes_no_more_than_its_requests_need(bench: AppBench, path: str) -> None:
    limit_bytes = LARGEST_BYTES[path]
    refused = await bench.post(path, b" " * (limit_bytes + 1))
    assert (refused.status, str(limit_bytes) in refused.json["detail"]) == (413, True)
    assert (await bench.post(path, b" " * limit_bytes)).status != 413


@pytest.mark.parametrize("path", [f"{API}/asample", "/v1/completions", "/v1/chat/completions", f"{API}/telemetry"])
async def test_no_path_takes_more_than_the_operator_allows(path: str) -> None:
    async with opened(max_body_bytes=2 * MIB) as bench:
        assert (await bench.request("POST", path, b" " * (2 * MIB + 1))).status == 413
        assert (await bench.request("POST", path, b" " * (2 * MIB))).status != 413
