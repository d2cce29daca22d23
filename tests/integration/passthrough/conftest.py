"""What passes through does so on uvloop, whose transports pause and break in their own way."""

from __future__ import annotations

from tests.integration.http.conftest import pytest_asyncio_loop_factories

__all__ = ["pytest_asyncio_loop_factories"]
