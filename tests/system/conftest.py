"""Environments of published SDKs, and what several files of this folder need."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from tests.redis_server import RedisServer
from tests.system.sdk_env import InstallError, SdkEnv, sdk_env

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


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
