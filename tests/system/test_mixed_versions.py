"""A rolling upgrade: an older release and this version share a Redis, and hand over in the middle of a run."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.redis_server import running_redis
from tests.system.crossroads import Crossroads
from tests.system.stack import Gateway, running_simulator
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.system.stack import Simulator

pytestmark = pytest.mark.slow

RELEASES: Final = Path(__file__).parents[1] / "data" / "releases"
SAMPLES: Final = 2000
# Both gateways serve for this part of the run; before it only the first one does, after it only the second.
BOTH_FROM: Final = 400
BOTH_UNTIL: Final = 1200


@pytest.fixture(scope="module", params=sorted(RELEASES.glob("*.whl")), ids=lambda path: path.name.split("-")[1])
def release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the modules of an older release; its dependencies are those of this version."""
    folder = tmp_path_factory.mktemp("release")
    zipfile.ZipFile(request.param).extractall(folder)
    return folder


def environment_of(release: Path | None) -> dict[str, str]:
    """What makes `python -m gateway` run the release, or this version where there is none."""
    return {**os.environ, "PYTHONPATH": str(release or Path(__file__).parents[2]), "PYTHONSAFEPATH": "1"}


@pytest.fixture
def gateways(tmp_path: Path) -> Iterator[list[Gateway]]:
    started: list[Gateway] = []
    yield started
    for gateway in started:
        gateway.close()


def port_of(gateway: Gateway) -> int:
    return int(gateway.url.rpartition(":")[2])


async def completed(simulator: Simulator, samples: int) -> None:
    await asyncio.to_thread(
        eventually, simulator.stats, f"{samples} samples", 120, until=lambda stats: stats["completed"] >= samples
    )


@pytest.mark.parametrize("upgrades", [True, False], ids=["upgrade", "roll back"])
async def test_no_sample_is_lost_when_another_version_takes_over(
    release: Path, upgrades: bool, gateways: list[Gateway], tmp_path: Path
) -> None:
    first, second = (release, None) if upgrades else (None, release)
    report = tmp_path / "report.json"
    with running_redis() as redis, running_simulator(tmp_path, "--mode", "latency", "--gen-seconds", "1") as simulator:
        for folder, addresses in ((first, "127.0.0.2,127.0.0.3"), (second, "127.0.0.4,127.0.0.5")):
            flags = ["--workers", "2", "--source-ips", addresses, "--redis-url", redis.url, "--log-format", "text"]
            gateways.append(Gateway(tmp_path, simulator.url, *flags, env=environment_of(folder)))
        versions = [gateway.status()["gateway"]["version"] for gateway in gateways]
        assert versions[0] != versions[1], "both are the same version"
        old, new = map(port_of, gateways)
        async with Crossroads(old) as crossroads:
            bench = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "gateway", "bench", "--url", crossroads.url, "--simulator", simulator.url),
                *("--samples", str(SAMPLES), "--concurrency", "300", "--seed", "11", "--json", str(report)),
                *("--abandon-polls", "0.1", "--duplicates", "0.1"),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            await completed(simulator, BOTH_FROM)
            crossroads.ports = (old, new)
            await completed(simulator, BOTH_UNTIL)
            crossroads.ports = (new,)
            # It finishes what it runs; what it has not delivered is in Redis, for the other one to deliver.
            assert await asyncio.to_thread(gateways[0].process.stop) is not None
            output, _ = await bench.communicate()
        assert bench.returncode == 0, output.decode()
        outcome: dict[str, Any] = json.loads(report.read_text())
        assert outcome["samples"]["completed"] == SAMPLES, output.decode()
        assert simulator.stats()["concurrent_duplicates"] == 0
