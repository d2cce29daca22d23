"""Environments of published SDKs, and what several files of this folder need."""

from __future__ import annotations

import sys
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from tests.redis_server import RedisServer, running_redis
from tests.system.fleet import Fleet
from tests.system.pinned import Client, connect_to
from tests.system.sdk_env import InstallError, SdkEnv, sdk_env

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.system.http_calls import Connection
    from tests.system.stack import Stack


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    """One that outlives the gateway."""
    with running_redis() as server:
        yield server


@pytest.fixture
def redis_url(redis: RedisServer) -> str:
    return redis.url


@pytest.fixture
def fleet(tmp_path: Path, redis_url: str) -> Iterator[Fleet]:
    with Fleet(tmp_path, redis_url) as made:
        yield made


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


@pytest.fixture(scope="module")
def key() -> str | None:
    """The API key of a module's connections."""
    return None


@pytest.fixture(scope="module")
def first(stack: Stack, key: str | None) -> Iterator[Connection]:
    """A connection to worker 0 of the module's `stack`."""
    with closing(connect_to(stack.gateway, 0, key)) as connection:
        yield connection


@pytest.fixture(scope="module")
def second(stack: Stack, key: str | None) -> Iterator[Connection]:
    """A connection to worker 1 of the module's `stack`."""
    with closing(connect_to(stack.gateway, 1, key)) as connection:
        yield connection


@pytest.fixture
def client(stack: Stack, first: Connection) -> Client:
    """Of sessions of its own."""
    return Client(first, stack.model)
