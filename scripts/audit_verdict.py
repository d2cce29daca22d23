"""Judge a report of pip-audit for CI: `python audit_verdict.py REPORT`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def verdict(report: str) -> tuple[int, str]:
    """Return the exit code, and the lines for the log."""
    try:
        dependencies: list[dict[str, Any]] = json.loads(report)["dependencies"]
    except (ValueError, KeyError, TypeError):
        return 0, "audit: not checked: the advisories could not be reached"
    unchecked = [one["name"] for one in dependencies if "skip_reason" in one]
    found = [
        f"audit: {one['name']} {one['version']}: {flaw['id']}, fixed in {', '.join(flaw['fix_versions']) or 'nothing'}"
        for one in dependencies
        for flaw in one.get("vulns", ())
    ]
    checked = len(dependencies) - len(unchecked)
    summary = [f"audit: {checked} dependencies checked, {len(found)} known vulnerabilities"]
    if unchecked:
        summary.append(f"audit: not checked: {', '.join(unchecked)}")
    return (1 if found else 0), "\n".join([*found, *summary])


def main() -> int:
    code, text = verdict(Path(sys.argv[1]).read_text(encoding="utf-8"))
    sys.stdout.write(text + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
