"""`gateway demo` and `gateway bench` as a person runs them: real processes, nothing prepared, nothing left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.system.bench_run import finished, gateway
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the command keeps what it needs for its run; it must be empty again afterwards."""
    # A UNIX socket's path is at most 107 bytes; pytest's own directory names are long.
    short = Path(tempfile.mkdtemp(prefix="gw-"))
    monkeypatch.setenv("TMPDIR", str(short))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
    yield short
    left = sorted(str(path.relative_to(short)) for path in short.rglob("*"))
    for path in sorted(short.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    short.rmdir()
    assert left == []


def gone(temporary_directory: Path) -> None:
    """A process that was killed has a moment for its end."""
    eventually(
        lambda: processes_mentioning(str(temporary_directory)), "no process left", until=lambda found: found == []
    )


def processes_mentioning(text: str) -> list[str]:
    """Command lines or environments of live processes that name `text`."""
    found = []
    for directory in Path("/proc").iterdir():
        if not directory.name.isdecimal() or int(directory.name) == os.getpid():
            continue
        try:
            told = (directory / "environ").read_bytes()
            command = (directory / "cmdline").read_bytes()
        except OSError:
            continue
        if text.encode() in told:
            found.append(command.replace(b"\0", b" ").decode())
    return found


async def test_the_demo_gets_every_sample_right_and_leaves_nothing(temporary_directory: Path) -> None:
    """A6: some of its submissions are repeated, some polls dropped, and nothing is executed twice."""
    code, output = await finished("demo", "--samples", "200")
    assert code == 0, output
    assert "200 of 200 ok, 0 failed, 0 wrong, 0 lost" in output
    assert re.search(r"workers +2 processes, .* s CPU, .* ms per sample", output)
    assert "127.0.2.1" in output and "127.0.2.2" in output
    assert "OK: nothing lost, nothing wrong, nothing executed twice" in output
    assert "scripts/gateway bench --preset burst" in output  # as the documents write it
    gone(temporary_directory)


@pytest.mark.parametrize("way", ["--session-poll", "--no-session-poll"])
async def test_the_bench_writes_its_report(way: str, temporary_directory: Path, tmp_path: Path) -> None:
    """A1 and A2 in small: all at once, polls abandoned just before the result lands, some samples cancelled."""
    path = tmp_path / "report.json"
    code, output = await finished(
        *("bench", "--samples", "300", "--gen-seconds", "0.3", "--abandon-polls", "0.3", "--duplicates", "0.2"),
        *("--cancel", "0.1", "--num-samples", "2", "--seed", "5", "--json", str(path), way),
    )
    assert code == 0, output
    report = json.loads(path.read_bytes())
    samples = report["samples"]
    assert samples["completed"] + samples["cancelled"] == 300
    assert samples["cancelled"] > 0
    assert samples["abandoned_polls"] > 0
    assert samples["wrong"] == samples["failed"] == 0
    assert report["client"]["session_poll"] == (way == "--session-poll")
    assert report["gateway"]["cpu_ms_per_sample"] > 0
    assert report["gateway"]["workers"] == 2
    assert report["simulator"]["duplicate_request_ids"] == 0
    gone(temporary_directory)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_demo_that_is_stopped_half_way_leaves_nothing(
    number: signal.Signals, temporary_directory: Path
) -> None:
    process = await gateway("bench", "--samples", "2000", "--gen-seconds", "60")
    assert process.stdout is not None
    line = b""
    while b"samples of" not in line:
        line = await process.stdout.readline()
        assert line, "ended before its load began"
    process.send_signal(number)
    await process.communicate()
    assert process.returncode == 130
    gone(temporary_directory)


async def test_a_gateway_that_does_not_start_is_quoted() -> None:
    code, output = await finished("bench", "--samples", "10", "--source-ips", "203.0.113.77")
    assert code == 3
    assert "203.0.113.77" in output


async def test_a_gateway_that_is_not_there_is_named() -> None:
    code, output = await finished("bench", "--samples", "10", "--url", "http://127.0.0.1:9")
    assert code == 3
    assert "no gateway answers at http://127.0.0.1:9" in output
