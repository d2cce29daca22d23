"""The processes' own words under a test that failed; and no test asserts how long something took."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests import started

if TYPE_CHECKING:
    from collections.abc import Generator

# Hypothesis' own deadline of 0.2 s is missed by any example while a busy machine runs something else.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


@pytest.fixture(autouse=True)
def environment_is_left_as_it_was() -> Generator[None]:
    """What one test leaves there is a flag of every gateway that a later one starts."""
    before = dict(os.environ)
    yield
    names = {name for name in before.keys() | os.environ.keys() if not name.startswith("PYTEST_")}
    assert {name: os.environ.get(name) for name in names} == {name: before.get(name) for name in names}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    started.forget_ended()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        report.sections.extend((f"log of {name}", text) for name, text in started.logs())
    return report
