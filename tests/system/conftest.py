"""Environments of published SDKs, and the processes' own words under a test that failed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from tests.redis_server import RedisServer
from tests.system.sdk_env import InstallError, SdkEnv, sdk_env
from tests.system.stack import running

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        for stack in running:
            report.sections.extend((f"log of the {name}", text) for name, text in stack.logs())
    return report


@pytest.fixture
def redis_url() -> Iterator[str]:
    """A Redis that outlives the gateway."""
    server = RedisServer()
    yield server.url
    server.stop()


@pytest.fixture(scope="session")
def published_sdk(request: pytest.FixtureRequest) -> Callable[[str], SdkEnv]:
    """The environment of a version. A version that cannot be installed fails its tests: they are not skipped."""
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def progress(line: str) -> None:
        with capture.global_and_fixture_disabled():
            sys.stderr.write(f"\n{line}\n")
            sys.stderr.flush()

    def make(version: str) -> SdkEnv:
        try:
            return sdk_env(version, progress)
        except InstallError as error:
            pytest.fail(str(error), pytrace=False)

    return make
