"""What several files of this folder need."""

from __future__ import annotations

import pytest

from tests.contract.conftest import Heard


@pytest.fixture
async def heard() -> Heard:
    return Heard()
