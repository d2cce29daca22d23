"""The store that a URL makes, and the imports that a worker's start avoids."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shared.core.errors import ConfigError
from shared.store.cluster import ClusterStore
from shared.store.one_server import RedisStore
from shared.store.open import make_store


@pytest.mark.parametrize(
    "url", ["redis://h", "rediss://h", "unix:///s", "redis+sentinel://h/m", "rediss+sentinel://h/m"]
)
def test_one_server_at_a_time(url: str) -> None:
    assert isinstance(make_store(url, "gw"), RedisStore)
    with pytest.raises(ConfigError, match=r"needs redis\+cluster://"):
        ClusterStore(url)


@pytest.mark.parametrize("url", ["redis+cluster://h", "rediss+cluster://h,g:1"])
def test_a_cluster(url: str) -> None:
    assert isinstance(make_store(url, "gw"), ClusterStore)
    with pytest.raises(ConfigError, match="cluster's store"):
        RedisStore(url)


def test_a_url_that_is_none() -> None:
    with pytest.raises(ConfigError, match="scheme"):
        make_store("http://h", "gw")


def test_a_worker_imports_neither_the_client_library_nor_the_cluster() -> None:
    """They would add 140 ms of CPU to its start."""
    code = "import sys, workers.worker; print([m for m in ('redis', 'shared.store.cluster') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
