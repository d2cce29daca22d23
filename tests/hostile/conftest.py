"""Workers run on uvloop, and so do these tests."""

from __future__ import annotations

from tests.integration.http.conftest import pytest_asyncio_loop_factories

__all__ = ["pytest_asyncio_loop_factories"]
