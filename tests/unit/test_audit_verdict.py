"""The dependency audit: a known vulnerability fails, an unreachable registry does not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

SCRIPT = Path(__file__).parents[2] / "scripts" / "audit_verdict.py"
FLAW = {"id": "PYSEC-1", "fix_versions": ["1.1"], "aliases": [], "description": ""}
CLEAN = {"name": "clean", "version": "1.0", "vulns": []}
FLAWED = {"name": "flawed", "version": "1.0", "vulns": [FLAW]}
UNKNOWN = {"name": "unknown", "skip_reason": "not found"}


def report_of(*dependencies: dict[str, Any]) -> str:
    return json.dumps({"dependencies": list(dependencies), "fixes": []})


@pytest.mark.parametrize(
    ("report", "code", "words"),
    [
        (report_of(CLEAN), 0, ["1 dependencies checked, 0 known vulnerabilities"]),
        (report_of(CLEAN, FLAWED), 1, ["flawed 1.0: PYSEC-1, fixed in 1.1", "2 dependencies checked"]),
        (report_of(CLEAN, UNKNOWN), 0, ["1 dependencies checked", "not checked: unknown"]),
        (report_of(FLAWED, UNKNOWN), 1, ["not checked: unknown"]),
        ("", 0, ["not checked: the advisories could not be reached"]),
        ("[]", 0, ["not checked"]),
    ],
)
def test_verdicts(tmp_path: Path, report: str, code: int, words: Sequence[str]) -> None:
    file = tmp_path / "report.json"
    file.write_text(report)
    ended = subprocess.run([sys.executable, SCRIPT, file], capture_output=True, text=True, check=False)
    assert ended.returncode == code
    assert all(word in ended.stdout for word in words)
