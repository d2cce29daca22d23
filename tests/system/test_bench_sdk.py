"""`gateway bench --client sdk`: the published SDK as load, from an environment that knows nothing of the gateway."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.system.bench_run import finished
from tests.system.sdk_env import VERSIONS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.system.sdk_env import SdkEnv

pytestmark = [pytest.mark.slow, pytest.mark.sdk]


@pytest.mark.parametrize("version", [VERSIONS[0], VERSIONS[-1]])
async def test_the_sdk_gets_every_sample_right_and_is_counted(
    version: str, published_sdk: Callable[[str], SdkEnv], tmp_path: Path
) -> None:
    path = tmp_path / "report.json"
    code, output = await finished(
        *("bench", "--client", "sdk", "--sdk-python", str(published_sdk(version).python), "--client-processes", "2"),
        *("--samples", "60", "--num-samples", "2", "--gen-seconds", "0.2", "--seed", "5", "--json", str(path)),
    )
    assert code == 0, output
    report = json.loads(path.read_bytes())
    assert report["samples"]["completed"] == 60
    assert report["samples"]["verified"]
    assert report["versions"]["tinker"] == version
    client = report["client"]
    assert (client["processes"], client["requests"], client["session_poll"]) == (2, None, version == VERSIONS[-1])
    assert client["polls"] >= 60
    assert client["cpu_seconds"] > 0
    assert report["simulator"]["executions"] == 60
    assert f"tinker {version}: 2 processes" in output


async def test_what_the_sdk_raises_is_counted_by_its_class(
    published_sdk: Callable[[str], SdkEnv], tmp_path: Path
) -> None:
    """More sequences than the gateway draws for one sample: the SDK's own error, not a lost sample."""
    path = tmp_path / "report.json"
    code, output = await finished(
        *("bench", "--client", "sdk", "--sdk-python", str(published_sdk(VERSIONS[-1]).python), "--samples", "2"),
        *("--prompt-tokens", "16", "--num-samples", "2000", "--seed", "5", "--json", str(path)),
    )
    assert code == 1, output
    report = json.loads(path.read_bytes())
    assert report["samples"] | {"failed": 2, "wrong": 0, "completed": 0} == report["samples"]
    [(kind, count)] = report["failures"].items()
    assert kind.endswith("Error")
    assert count == 2
