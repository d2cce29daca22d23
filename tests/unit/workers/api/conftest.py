"""Whole applications in process, without keys and with some."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.app_bench import KEYS, opened

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.app_bench import AppBench


@pytest.fixture
async def bench() -> AsyncIterator[AppBench]:
    async with opened() as made:
        yield made


@pytest.fixture
async def keyed() -> AsyncIterator[AppBench]:
    async with opened(api_keys=KEYS) as made:
        yield made
