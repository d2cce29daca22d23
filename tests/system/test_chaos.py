"""A load that goes on while everything under it is broken: small and with fixed times, for every commit.

The same with random times, many times over: benchmarks/chaos_soak.py.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

SAMPLES = 400
LOAD = (
    *("--samples", str(SAMPLES), "--concurrency", "100", "--gen-seconds", "1", "--abandon-polls", "0.2"),
    *("--cancel", "0.02", "--duplicates", "0.1", "--seed", "4"),
)


async def chaos(path: Path, plan: str, way: str) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway", "bench", *LOAD, way, "--chaos", plan, "--json", str(path)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return read(path)


def read(path: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(path.read_bytes())
    return report


@pytest.mark.parametrize(
    ("way", "plan"),
    [
        ("--session-poll", "kill-worker@0.5,kill-upstream@2,wipe-redis@5"),
        ("--no-session-poll", "restart-redis@0.5,stall-redis@2,kill-worker@3"),
    ],
)
async def test_every_sample_comes_back_right_whatever_breaks(way: str, plan: str, tmp_path: Path) -> None:
    """B11, C3, C6 and C7 under one load: nothing lost, nothing wrong, nothing executed more often than allowed."""
    report = await chaos(tmp_path / "report.json", plan, way)
    samples, simulator = report["samples"], report["simulator"]
    assert samples["completed"] + samples["cancelled"] == SAMPLES
    assert (samples["failed"], samples["wrong"], simulator["concurrent_duplicates"]) == (0, 0, 0)
    assert simulator["executions"] <= simulator["allowed_executions"]
    # Every fault happened, and the gateway served again after each.
    assert [event["what"] for event in report["chaos"]] == [item.partition("@")[0] for item in plan.split(",")]
    assert all(event["recovered_after_s"] is not None for event in report["chaos"])
