"""A gateway whose standard streams were closed before its start, or whose reader went away."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.integration.gateway_process import ROOT
from tests.waiting import DEADLINE_S

if TYPE_CHECKING:
    from pathlib import Path

COMMAND = f"exec {sys.executable} -m gateway"


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", ">&-", "2>&-", "<&-"])
@pytest.mark.parametrize(
    ("arguments", "code"), [("--version", 0), ("--no-such-flag", 2), ("--upstream http://u --workers x", 2)]
)
def test_a_stream_that_is_closed_at_the_start_is_no_traceback(closed: str, arguments: str, code: int) -> None:
    ended = subprocess.run(
        f"{COMMAND} {arguments} {closed}", shell=True, cwd=ROOT, capture_output=True, timeout=DEADLINE_S
    )
    assert (ended.returncode, b"Traceback" in ended.stderr + ended.stdout) == (code, False)


def test_what_is_opened_gets_no_standard_number(tmp_path: Path) -> None:
    """The next socket would have it, and a worker's traceback would be sent to whoever is connected there."""
    script = (
        "import json, os, sys\nfrom gateway.cli import _open_missing_streams\n_open_missing_streams()\n"
        "opened = os.open('/dev/zero', os.O_RDONLY)\nfound = [os.readlink(f'/proc/self/fd/{n}') for n in range(3)]\n"
        f"open({str(tmp_path / 'found')!r}, 'w').write(json.dumps((opened, found, os.get_inheritable(1))))\n"
    )
    quoted = script.replace('"', '\\"')
    subprocess.run(f'exec {sys.executable} -c "{quoted}" <&- >&- 2>&-', shell=True, cwd=ROOT, timeout=DEADLINE_S)
    opened, found, inherited = json.loads((tmp_path / "found").read_text())
    assert opened > 2 and found == ["/dev/null"] * 3 and inherited


def test_a_reader_that_went_away_is_no_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = subprocess.run(
            f"{COMMAND} --help", shell=True, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, timeout=DEADLINE_S
        )
    finally:
        os.close(writing)
    assert ended.returncode == 1
    assert ended.stderr == b""
